# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The segmented free queue, alone and in a block pool."""

import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.free_block_queue import (
    NUM_PROBATIONARY_LEVELS,
    SegmentedFreeBlockQueue,
    checkpoint_levels,
)
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import Request

pytestmark = [pytest.mark.cpu_test, pytest.mark.skip_global_cleanup]

FREE, PROTECTED, TOP = "free", 0, NUM_PROBATIONARY_LEVELS


def make_queue(*segments) -> tuple[SegmentedFreeBlockQueue, list[KVCacheBlock]]:
    """A queue of one block a segment (FREE, PROTECTED or a level), freed in order."""
    blocks = [KVCacheBlock(i) for i in range(len(segments))]
    queue = SegmentedFreeBlockQueue(blocks)
    queue.popleft_n(len(blocks))
    for block, segment in zip(blocks, segments):
        put_back(queue, block, segment)
    return queue, blocks


def put_back(queue: SegmentedFreeBlockQueue, block: KVCacheBlock, segment) -> None:
    if segment is FREE:
        queue.prepend_n([block])
        return
    if block.block_hash is None:
        block.set_block_hash(BlockHashWithGroupId(b"%d" % block.block_id))
    queue.mark_probationary([block], [segment])
    queue.append_n([block])


def order(queue: SegmentedFreeBlockQueue) -> list[int]:
    """Block IDs in eviction order, read in both directions."""
    ids = [block.block_id for block in queue.get_all_free_blocks()]
    backwards, block = [], queue.fake_free_list_tail.prev_free_block
    while block is not queue.fake_free_list_head:
        backwards.append(block.block_id)
        block = block.prev_free_block
    assert ids == backwards[::-1]
    assert queue.num_free_blocks == len(ids)
    return ids


def test_eviction_order_is_free_then_levels_then_protected():
    queue, _ = make_queue(PROTECTED, 3, FREE, 1, PROTECTED, TOP, 1, FREE, 3)
    assert order(queue) == [7, 2, 3, 6, 1, 8, 5, 0, 4]
    assert [block.block_id for block in queue.popleft_n(5)] == [7, 2, 3, 6, 1]
    assert queue.popleft().block_id == 8
    assert order(queue) == [5, 0, 4]


SEGMENTS = [FREE, FREE, 1, 1, 2, TOP, TOP, PROTECTED, PROTECTED]


def rank(segment) -> int:
    """Position of a segment in the eviction order."""
    ranks = {FREE: 0, PROTECTED: TOP + 1}
    return ranks.get(segment, segment)


def ranks_in_order(queue: SegmentedFreeBlockQueue, segments: list) -> list[int]:
    return [rank(segments[block_id]) for block_id in order(queue)]


@pytest.mark.parametrize("popped", range(len(SEGMENTS) + 1))
def test_segments_refill_after_pops(popped):
    """A segment that was popped empty starts anew in front of the next one."""
    queue, _ = make_queue(*SEGMENTS)
    segments = list(SEGMENTS)
    refill = [PROTECTED, TOP, 2, 1, FREE, FREE, 1, TOP, 2]
    for block, segment in zip(queue.popleft_n(popped), refill):
        block.reset_hash()
        queue.forget(block)
        put_back(queue, block, segment)
        segments[block.block_id] = segment
        ranks = ranks_in_order(queue, segments)
        assert ranks == sorted(ranks)
    assert len(order(queue)) == len(SEGMENTS)


@pytest.mark.parametrize("removed", range(len(SEGMENTS)))
@pytest.mark.parametrize("segment", [FREE, 1, 2, TOP, PROTECTED])
def test_segments_refill_after_a_removal(removed, segment):
    queue, blocks = make_queue(*SEGMENTS)
    rest = [block_id for block_id in order(queue) if block_id != removed]
    queue.remove(blocks[removed])
    assert order(queue) == rest
    queue.promote([blocks[removed]])
    put_back(queue, blocks[removed], segment)
    segments = list(SEGMENTS)
    segments[removed] = segment
    ranks = ranks_in_order(queue, segments)
    assert ranks == sorted(ranks)
    same = [i for i in order(queue) if segments[i] == segment]
    assert same[0 if segment is FREE else -1] == removed


def test_remove_refuses_a_block_that_is_not_free():
    queue, blocks = make_queue(FREE, PROTECTED)
    queue.remove(blocks[0])
    with pytest.raises(RuntimeError):
        queue.remove(blocks[0])


def test_eviction_level_is_that_of_the_head():
    queue, _ = make_queue(PROTECTED, TOP, FREE, 3)
    levels = []
    while queue.num_free_blocks:
        levels.append(queue.eviction_level())
        queue.popleft()
    assert levels == [0, 3, TOP, TOP + 1]
    assert queue.eviction_level() == 0


def test_promoted_block_is_freed_as_protected():
    queue, blocks = make_queue(PROTECTED, 4, PROTECTED)
    assert order(queue) == [1, 0, 2]
    queue.remove(blocks[1])
    queue.promote([blocks[1]])
    queue.append_n([blocks[1]])
    assert order(queue) == [0, 2, 1]


def test_block_that_loses_its_hash_goes_first():
    queue, blocks = make_queue(PROTECTED, 4, 4, FREE)
    for lost in (2, 0):
        blocks[lost].reset_hash()
        queue.forget(blocks[lost])
    assert order(queue) == [0, 2, 3, 1]
    *others, in_use = queue.popleft_n(4)
    in_use.reset_hash()
    queue.forget(in_use)
    assert order(queue) == []
    queue.append_n([*others, in_use])
    assert order(queue)[-1] == in_use.block_id


def test_reset_makes_all_blocks_free():
    queue, blocks = make_queue(PROTECTED, 4, FREE, 1)
    before = order(queue)
    queue.reset()
    assert order(queue) == before
    taken = queue.popleft_n(2)
    queue.append_n(taken)
    assert order(queue) == before[2:] + before[:2]
    put_back(queue, queue.popleft(), 1)
    assert order(queue)[-1] == before[1]


def test_cursor_walks_in_eviction_order():
    queue, blocks = make_queue(PROTECTED, 2, FREE, 1)
    walk = queue.iter_blocks_after(None)
    assert [next(walk).block_id for _ in range(2)] == [2, 3]
    rest = queue.iter_blocks_after(blocks[3])
    assert [block.block_id for block in rest] == [1, 0]


def test_levels_thin_out_aligned():
    """One block a boundary: the ruler sequence, capped at the top level."""
    num_boundaries = 2 << TOP
    levels = checkpoint_levels(0, num_boundaries, 1, 1, 0)
    ruler = [(n & -n).bit_length() for n in range(1, num_boundaries + 1)]
    assert max(ruler) > TOP
    assert list(levels) == [min(n, TOP) for n in ruler]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("need", [1, 2, 4, 7, 8, 9, 33, 20_000])
@pytest.mark.parametrize("start", [0, 5, 40])
def test_level_is_the_highest_of_the_boundaries_that_need_the_block(start, need, shift):
    per_boundary, end = 4, 90
    expected = []
    for block in range(start, end):
        boundaries = [
            n
            for n in range(1, (end + need) // per_boundary + 1)
            if n * per_boundary + shift - need <= block < n * per_boundary + shift
        ]
        ranks = [(n & -n).bit_length() for n in boundaries]
        expected.append(min(max(ranks, default=0), TOP))
    levels = checkpoint_levels(start, end, per_boundary, need, shift)
    assert list(levels) == expected


@pytest.mark.parametrize("use_eagle", [False, True])
@pytest.mark.parametrize("window", [8, 9, 65, 128])
@pytest.mark.parametrize("start", [0, 5, 40])
def test_blocks_with_a_level_are_those_that_the_dense_mask_keeps(
    start, window, use_eagle
):
    block_size, alignment, end = 8, 256, 200
    mask = SlidingWindowManager.reachable_block_mask(
        start_block=start,
        end_block=end,
        alignment_tokens=alignment,
        kv_cache_spec=SlidingWindowSpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=64,
            dtype=torch.bfloat16,
            sliding_window=window,
        ),
        use_eagle=use_eagle,
    )
    need = cdiv(window - 1, block_size) + use_eagle
    levels = checkpoint_levels(start, end, alignment // block_size, need, use_eagle)
    assert mask == [level > 0 for level in levels]


class Pool:
    """A block pool whose blocks are cached as one request's, one token each."""

    def __init__(self, num_blocks: int):
        init_none_hash(sha256)
        self.pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=1)
        self.next_token = 0

    def take(self, count: int) -> list[KVCacheBlock]:
        return self.pool.get_new_blocks(count)

    def cache(self, blocks: list[KVCacheBlock], level: int = PROTECTED) -> None:
        prompt = list(range(self.next_token, self.next_token + len(blocks)))
        self.next_token += len(blocks)
        request = Request(
            request_id=str(self.next_token),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=get_request_block_hasher(1, sha256),
        )
        self.pool.cache_full_blocks(request, blocks, 0, len(blocks), 1, 0)
        self.pool.free_block_queue.mark_probationary(blocks, [level] * len(blocks))

    def handed_out(self, count: int) -> list[int]:
        return [block.block_id for block in self.take(count)]


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def test_pool_evicts_a_hash_only_when_nothing_cheaper_is_left():
    pool = Pool(11)
    protected, low, high, plain = (pool.take(n) for n in (3, 2, 2, 3))
    pool.cache(protected)
    pool.cache(low, 1)
    pool.cache(high, 7)
    for blocks in (protected, high, low, plain):
        pool.pool.free_blocks(blocks)
    cached = pool.pool.cached_block_hash_to_block
    assert pool.handed_out(3) == ids(plain) and len(cached) == 7
    assert pool.handed_out(2) == ids(low) and len(cached) == 5
    assert pool.handed_out(2) == ids(high) and len(cached) == 3
    assert pool.handed_out(3) == ids(protected) and len(cached) == 0


@pytest.mark.parametrize("in_use", [False, True])
def test_pool_keeps_a_pinned_checkpoint_on_probation(in_use):
    """A store that copies a checkpoint is no request that hits it."""
    pool = Pool(4)
    first, pinned, last = ([block] for block in pool.take(3))
    for blocks, level in ((first, 1), (pinned, 1), (last, 2)):
        pool.cache(blocks, level)
    if not in_use:
        pool.pool.free_blocks(pinned)
    pool.pool.touch(pinned)
    for blocks in (first, last, pinned) + ((pinned,) if in_use else ()):
        pool.pool.free_blocks(blocks)
    assert pool.handed_out(3) == ids(first + pinned + last)


def test_pool_hands_out_first_what_evict_blocks_unhashed():
    pool = Pool(5)
    protected, probationary = pool.take(2), pool.take(2)
    pool.cache(protected)
    pool.cache(probationary, 2)
    pool.pool.free_blocks(protected + probationary)
    lost = {protected[0].block_id, probationary[1].block_id}
    pool.pool.evict_blocks(lost)
    assert set(pool.handed_out(2)) == lost
    assert pool.handed_out(2) == [probationary[0].block_id, protected[1].block_id]


def test_pool_forgets_the_level_of_a_block_evicted_in_use():
    pool = Pool(3)
    evicted, other = ([block] for block in pool.take(2))
    pool.cache(evicted, 5)
    pool.cache(other, 1)
    pool.pool.evict_blocks({evicted[0].block_id})
    pool.pool.free_blocks(other + evicted)
    assert pool.handed_out(2) == ids(evicted + other)
    pool.cache(evicted)
    pool.cache(other)
    pool.pool.free_blocks(evicted + other)
    assert pool.handed_out(2) == ids(evicted + other)


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("hashed", [False, True])
def test_unpinned_blocks_stay_at_the_very_end(hashed, evict):
    pool = Pool(4)
    unpinned, protected, probationary = ([block] for block in pool.take(3))
    pool.cache(protected)
    pool.cache(probationary, TOP)
    if hashed:
        pool.cache(unpinned, 1)
    reused: list[int] = []
    pool.pool.free_blocks(protected)
    pool.pool.unpin_blocks(unpinned, lambda block: reused.append(block.block_id))
    pool.pool.free_blocks(probationary)
    if evict:  # A failed load does not cut the reader short.
        pool.pool.evict_blocks(set(ids(unpinned)))
    assert pool.handed_out(2) == ids(probationary + protected)
    assert reused == []
    assert pool.handed_out(1) == ids(unpinned) == reused


def test_reset_prefix_cache_forgets_levels():
    pool = Pool(4)
    blocks = pool.take(3)
    pool.cache(blocks, 1)
    pool.pool.free_blocks(blocks)
    assert pool.pool.reset_prefix_cache()
    protected, probationary, plain = ([block] for block in pool.take(3))
    pool.cache(protected)
    pool.cache(probationary, TOP)
    for group in (protected, probationary, plain):
        pool.pool.free_blocks(group)
    assert pool.handed_out(3) == ids(plain + probationary + protected)


def test_pool_without_caching_is_lifo():
    pool = BlockPool(6, enable_caching=False, hash_block_size=1)
    first, second = pool.get_new_blocks(2), pool.get_new_blocks(3)
    pool.free_blocks(first)
    pool.free_blocks(second)
    assert ids(pool.get_new_blocks(5)) == ids(second + first)
