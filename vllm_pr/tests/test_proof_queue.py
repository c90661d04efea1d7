# SPDX-License-Identifier: Apache-2.0
"""A real block pool with the segmented queue, against a plain slow model.

Random sequences of everything that a scheduler, a KV connector and a host offload do
to a pool (hypothesis, stateful). The model is lists and dictionaries, no links: a list
of block IDs for each segment. After every step the pool must be in the model's state,
and the order of design section 2 must hold by what the blocks themselves say.

``VLLM_PR_PROOF_STEPS=1000000 pytest vllm_pr/tests/test_proof_queue.py`` is the long
mode: that many steps, from a new random seed.
"""

import logging
import math
import os
from collections import Counter
from itertools import islice, pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import block_pool
from vllm.v1.core.free_block_queue import (
    NUM_PROBATIONARY_LEVELS,
    SegmentedFreeBlockQueue,
)
from vllm.v1.core.kv_cache_utils import (
    FreeKVCacheBlockQueue,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.request import Request

FREE, PROTECTED = 0, NUM_PROBATIONARY_LEVELS + 1
STEPS = int(os.environ.get("VLLM_PR_PROOF_STEPS", "20000"))
LONG = "VLLM_PR_PROOF_STEPS" in os.environ
STEPS_PER_RUN = 50
GROUP = 0
LEVELS = st.sampled_from((1, 2, NUM_PROBATIONARY_LEVELS))

logging.getLogger(block_pool.__name__).setLevel(logging.ERROR)
os.environ.setdefault("PYTHONHASHSEED", "0")  # the same keys in each run
init_none_hash(sha256)
_hasher = get_request_block_hasher(1, sha256)


def chain(content: int, length: int) -> Request:
    """A request of ``length`` blocks of one token; equal content is an equal prefix."""
    return Request(
        request_id=f"{content}-{length}",
        prompt_token_ids=[content * 1000 + i for i in range(length)],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=_hasher,
    )


class Model:
    """What the pool must do, spelled out: one list a segment, nothing linked."""

    def __init__(self, num_blocks: int) -> None:
        ids = range(1, num_blocks)  # block 0 is the null block
        self.segments: list[list[int]] = [[] for _ in range(PROTECTED + 1)]
        self.segments[FREE] = list(ids)
        self.references = dict.fromkeys(ids, 0)
        self.level = dict.fromkeys(ids, 0)
        self.keys: dict[int, list] = {i: [] for i in ids}
        self.cached: dict[object, list[int]] = {}
        self.watched: set[int] = set()

    def order(self) -> list[int]:
        return [block for segment in self.segments for block in segment]

    def take(self, count: int) -> tuple[list[int], list[int]]:
        """Blocks handed out, and those of them whose watcher fires."""
        taken = self.order()[:count]
        fired = [block for block in taken if block in self.watched]
        self.watched -= set(taken)
        for block in taken:
            self._leave(block)
            self.references[block] = 1
            self.drop_keys(block)
        return taken, fired

    def give_back(self, blocks: list[int]) -> None:
        bare = []
        for block in blocks:
            self.references[block] -= 1
            if self.references[block]:
                continue
            if self.keys[block]:
                self.segments[self.level[block] or PROTECTED].append(block)
            else:
                bare.append(block)
        self.segments[FREE][:0] = bare

    def unpin(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] -= 1
            self.level[block] = 0
            self.watched.add(block)
            if not self.references[block]:
                self.segments[PROTECTED].append(block)

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self.references[block]:
                self._leave(block)
            self.references[block] += 1

    def promote(self, blocks: list[int]) -> None:
        for block in blocks:
            self.level[block] = 0

    def add_key(self, block: int, key: object) -> None:
        if block not in self.cached.get(key, []):
            self.keys[block].append(key)
            self.cached.setdefault(key, []).append(block)

    def drop_keys(self, block: int) -> list:
        """Forget a block's hashes; if free, it goes next, or last if still read."""
        dropped = self.keys[block]
        for key in dropped:
            self.cached[key].remove(block)
            if not self.cached[key]:
                del self.cached[key]
        if dropped:
            self.level[block] = 0
            if not self.references[block]:
                self._leave(block)
                if block in self.watched:
                    self.segments[PROTECTED].append(block)
                else:
                    self.segments[FREE].insert(0, block)
        self.keys[block] = []
        return dropped

    def reset(self) -> None:
        self.segments = [self.order(), *[[] for _ in range(PROTECTED)]]
        self.cached.clear()
        self.watched.clear()
        self.keys = {block: [] for block in self.keys}
        self.level = dict.fromkeys(self.level, 0)

    def _leave(self, block: int) -> None:
        for segment in self.segments:
            if block in segment:
                segment.remove(block)


class PoolMachine(RuleBasedStateMachine):
    """The pool beside the model; a rule is what somebody does to the pool."""

    queue_class: type = SegmentedFreeBlockQueue
    counts: Counter = Counter()

    @initialize(
        num_blocks=st.integers(2, 24),
        levels=st.sets(LEVELS, min_size=1, max_size=3),
    )
    def start(self, num_blocks: int, levels: set[int]) -> None:
        original = block_pool.SegmentedFreeBlockQueue
        block_pool.SegmentedFreeBlockQueue = self.queue_class
        try:
            self.pool = block_pool.BlockPool(
                num_blocks, enable_caching=True, hash_block_size=1
            )
        finally:
            block_pool.SegmentedFreeBlockQueue = original
        self.model = Model(num_blocks)
        # Few levels in one run, so that blocks meet within a level.
        self.fates = st.sampled_from([None, PROTECTED, *sorted(levels)])
        self.held: list[list[int]] = []  # one list of block IDs a request
        self.fired: list[int] = []
        self.cursor: int | None = None
        self.counts["runs"] += 1
        self.counts["steps"] -= 1  # the invariants are checked before any step, too

    def blocks(self, ids: list[int]) -> list:
        return [self.pool.blocks[block] for block in ids]

    def pick(self, data: st.DataObject) -> list[int]:
        return self.held[data.draw(st.integers(0, len(self.held) - 1))]

    def release(self, data: st.DataObject) -> list[int]:
        return self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    @precondition(lambda self: self.model.order())
    @rule(data=st.data(), content=st.one_of(st.none(), st.integers(0, 3)))
    def allocate(self, data, content) -> None:
        """A step of a request: its new blocks, cached when they will be full."""
        available = len(self.model.order())
        count = data.draw(st.integers(1, available + 1))
        if count > available:
            with pytest.raises(ValueError):
                self.pool.get_new_blocks(count)
            return
        taken = [block.block_id for block in self.pool.get_new_blocks(count)]
        expected, fired = self.model.take(count)
        assert taken == expected
        assert self.fired == fired
        self.fired.clear()
        self.held.append(taken)
        if content is not None:
            self.cache_from(data, taken, 0, content)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), content=st.integers(0, 3))
    def cache(self, data, content) -> None:
        """Cache the rest of a request's blocks."""
        blocks = self.pick(data)
        first = sum(1 for block in blocks if self.model.keys[block])
        if not any(self.model.keys[block] for block in blocks[first:]):
            self.cache_from(data, blocks, first, content)

    def cache_from(self, data, blocks: list[int], first: int, content: int) -> None:
        """Each block becomes protected, goes on probation or gets no hash at all."""
        count = len(blocks) - first
        fates = data.draw(st.lists(self.fates, min_size=count, max_size=count))
        levels = [0 if fate in (None, PROTECTED) else fate for fate in fates]
        request = chain(content, len(blocks))
        self.pool.cache_full_blocks(
            request,
            self.blocks(blocks),
            first,
            len(blocks),
            1,
            GROUP,
            block_mask=[fate is not None for fate in fates],
        )
        queue = self.pool.free_block_queue
        queue.mark_probationary(self.blocks(blocks[first:]), levels)
        # The null block is one of a request's blocks too.
        queue.mark_probationary([self.pool.null_block], [3])
        for i, fate in enumerate(fates, start=first):
            if fate is not None:
                self.model.add_key(blocks[i], request.block_hashes[i])
                self.model.level[blocks[i]] = (
                    levels[i - first] or self.model.level[blocks[i]]
                )

    @precondition(lambda self: self.held)
    @rule(data=st.data(), content=st.integers(4, 5), replace=st.booleans())
    def cache_partial(self, data, content, replace) -> None:
        """Give a block one more hash, or another one instead of all it has."""
        blocks = self.pick(data)
        if not blocks:
            return
        block = data.draw(st.sampled_from(blocks))
        known = self.pool.blocks[block].block_hash_num_tokens
        length = data.draw(st.integers(1, 3))
        request = chain(content, 3)
        key = request.block_hashes[length - 1]
        self.pool.cache_partial_block(
            request, self.pool.blocks[block], length, GROUP, 1, replace
        )
        longer = known is not None and known < length
        if replace or (longer and key not in self.model.keys[block]):
            self.model.drop_keys(block)
        self.model.add_key(block, key)

    @precondition(lambda self: self.model.cached)
    @rule(data=st.data())
    def hit(self, data) -> None:
        """A request finds cached blocks, free or in use, and shares them.

        A block with several hashes still stands once in the request's table.
        """
        count = data.draw(st.integers(1, min(4, len(self.model.cached))))
        keys = data.draw(st.permutations(sorted(self.model.cached)))[:count]
        expected = list(dict.fromkeys(self.model.cached[key][0] for key in keys))
        found = [self.pool.get_cached_block(key, [GROUP])[0] for key in keys]
        found = list({block.block_id: block for block in found}.values())
        assert [block.block_id for block in found] == expected
        self.pool.touch(found)
        self.pool.free_block_queue.promote(found)
        self.model.touch(expected)
        self.model.promote(expected)
        self.held.append(expected)

    @precondition(lambda self: self.model.order())
    @rule(data=st.data())
    def pin(self, data) -> None:
        """An offload takes free blocks by their IDs, with a hash or without."""
        order = self.model.order()
        ids = data.draw(st.lists(st.sampled_from(order), max_size=3, unique=True))
        self.pool.touch(self.blocks(ids))
        self.model.touch(ids)
        self.held.append(ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data) -> None:
        """A request ends; its last block is the first to be evicted."""
        blocks = self.release(data)
        self.pool.free_blocks(self.blocks(blocks[::-1]))
        self.model.give_back(blocks[::-1])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def slide_window(self, data) -> None:
        """A request gives back its oldest blocks and goes on."""
        blocks = self.release(data)
        count = data.draw(st.integers(0, len(blocks)))
        gone = blocks[:count][::-1]
        self.held.append(blocks[count:])
        self.pool.free_blocks(self.blocks(gone))
        self.model.give_back(gone)

    @rule(data=st.data())
    def evict(self, data) -> None:
        """A KV load failed: whatever was to be loaded there is not cached."""
        ids = data.draw(
            st.sets(st.sampled_from(sorted(self.model.references)), max_size=3)
        )
        self.pool.evict_blocks(ids)
        for block in ids:
            self.model.drop_keys(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unpin(self, data) -> None:
        blocks = self.release(data)
        self.pool.unpin_blocks(
            self.blocks(blocks), lambda block: self.fired.append(block.block_id)
        )
        self.model.unpin(blocks)

    @precondition(
        lambda self: any(self.model.keys.values())
        and any(
            self.model.references[block] and not keys
            for block, keys in self.model.keys.items()
        )
    )
    @rule(data=st.data())
    def move_hashes(self, data) -> None:
        """Copy on write: the cache keeps a private copy of a block in use."""
        model = self.model
        sources = [block for block, keys in model.keys.items() if keys]
        targets = [
            block
            for block, count in model.references.items()
            if count and not model.keys[block]
        ]
        source = data.draw(st.sampled_from(sources))
        target = data.draw(st.sampled_from(targets))
        self.pool.move_block_hashes(*self.blocks([source, target]))
        for key in model.drop_keys(source):
            model.add_key(target, key)

    @precondition(lambda self: not self.held or len(self.held) > 4)
    @rule()
    def reset(self) -> None:
        idle = not any(self.model.references.values())
        assert self.pool.reset_prefix_cache() is idle
        if idle:
            assert sorted(self.fired) == sorted(self.model.watched)
            self.fired.clear()
            self.model.reset()

    @rule(count=st.integers(1, 8))
    def walk(self, count) -> None:
        """Walk on from a cursor that other steps may have moved, as an offload does."""
        order = self.model.order()
        cursor = self.cursor if self.cursor in order else None
        walk = self.pool.free_block_queue.iter_blocks_after(
            None if cursor is None else self.pool.blocks[cursor]
        )
        seen = [block.block_id for block in islice(walk, count)]
        start = 0 if cursor is None else order.index(cursor) + 1
        assert seen == order[start : start + count]
        self.cursor = seen[-1] if seen else cursor

    @invariant()
    def links_hold_the_order(self) -> None:
        """One chain between the fake ends, the same in both directions."""
        queue, order = self.pool.free_block_queue, self.model.order()
        assert [block.block_id for block in queue.get_all_free_blocks()] == order
        chain = [
            queue.fake_free_list_head,
            *self.blocks(order),
            queue.fake_free_list_tail,
        ]
        for left, right in pairwise(chain):
            assert left.next_free_block is right
            assert right.prev_free_block is left
        assert queue.num_free_blocks == self.pool.get_num_free_blocks() == len(order)

    @invariant()
    def ends_are_the_last_of_their_segments(self) -> None:
        """An end of an empty segment may be a block that has been popped since."""
        queue = self.pool.free_block_queue
        for segment, end in zip(self.model.segments, queue._ends):
            if segment:
                assert end is self.pool.blocks[segment[-1]]
            elif end not in (None, queue.fake_free_list_head):
                assert end.next_free_block is None

    @invariant()
    def every_block_is_free_once_or_referenced(self) -> None:
        free = Counter(self.model.order())
        held = Counter(block for blocks in self.held for block in blocks)
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == held[block.block_id]
            assert free[block.block_id] == (block.ref_cnt == 0)
            linked = block.prev_free_block, block.next_free_block
            assert (None in linked) == (block.ref_cnt > 0)

    @invariant()
    def nothing_costly_goes_before_something_cheap(self) -> None:
        """By what the blocks say; blocks still read by somebody go last."""
        watched = self.pool._reuse_watchers
        ranks = [
            FREE if block.block_hash is None else self.model.level[i] or PROTECTED
            for i in self.model.order()
            if (block := self.pool.blocks[i]).block_id not in watched
        ]
        assert ranks == sorted(ranks)
        head = next(iter(self.model.order()), None)
        hashed = head is not None and self.pool.blocks[head].block_hash is not None
        level = (self.model.level[head] or PROTECTED) if hashed else FREE
        assert self.pool.free_block_queue.eviction_level() == level

    @invariant()
    def hash_map_and_levels_agree(self) -> None:
        levels = self.pool.free_block_queue._levels
        assert not levels[self.pool.null_block.block_id]
        cached = self.pool.cached_block_hash_to_block
        assert len(cached) == len(self.model.cached)
        for key, ids in self.model.cached.items():
            found = self.pool.get_cached_block(key, [GROUP])
            assert found and found[0].block_id == ids[0]
        for block in self.pool.blocks[1:]:
            hashed = block.block_hash is not None
            assert hashed == bool(self.model.keys[block.block_id])
            assert levels[block.block_id] == self.model.level[block.block_id]

    @invariant()
    def count_step(self) -> None:
        self.counts["steps"] += 1


def run(machine: type[PoolMachine], steps: int, **options: object) -> None:
    """At least ``steps`` steps of a machine, STEPS_PER_RUN at most from a new pool."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=math.ceil(steps / STEPS_PER_RUN),
            stateful_step_count=STEPS_PER_RUN,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            **options,
        ),
    )


def test_pool_agrees_with_the_plain_model(figure):
    PoolMachine.counts = counts = Counter()
    while counts["steps"] < STEPS:
        missing = max(STEPS - counts["steps"], STEPS_PER_RUN)
        run(PoolMachine, missing, derandomize=not LONG)
    figure("property steps run", counts["steps"])
    assert counts["steps"] >= STEPS


def fault(name: str, **methods: object) -> object:
    """A queue with one deliberate fault, as a test parameter."""
    return pytest.param(type("Faulty", (SegmentedFreeBlockQueue,), methods), id=name)


def _after(method: str, fix: object) -> object:
    """The method, and ``fix(queue, before, arguments)`` afterwards."""

    def wrapped(self, *arguments):
        before = dict(vars(self), _levels=bytearray(self._levels))
        before["_ends"] = list(self._ends)
        result = getattr(SegmentedFreeBlockQueue, method)(self, *arguments)
        fix(self, before, *arguments)
        return result

    return wrapped


def _keep(*names: str) -> object:
    """A fix-up that undoes a method's bookkeeping of ``names``."""

    def fix(queue, before, *_):
        for name in names:
            setattr(queue, name, before[name])

    return fix


def _mark_regardless(self, blocks, levels):
    for block, level in zip(blocks, levels, strict=True):
        self._levels[block.block_id] = level


def _mark_lowest(self, blocks, levels):
    SegmentedFreeBlockQueue.mark_probationary(
        self, blocks, [int(n > 0) for n in levels]
    )


def _probationary(queue, blocks):
    return [block for block in blocks if queue._levels[block.block_id]]


def _insert_without_back_link(queue, before, blocks):
    for block in _probationary(queue, blocks):
        block.next_free_block.prev_free_block = block.prev_free_block


def _insert_uncounted(queue, before, blocks):
    queue.num_free_blocks -= len(_probationary(queue, blocks))


def _insert_behind_the_end(queue, before, blocks):
    for level, end in enumerate(before["_ends"]):
        if level and end is not None:
            queue._ends[level] = end


def _keep_free_end(queue, before, *_):
    queue._ends[0] = before["_ends"][0]


def _keep_level_ends(queue, before, *_):
    queue._ends[1:] = before["_ends"][1:]


def _forget_in_place(self, block, still_read=False):
    self._levels[block.block_id] = 0


def _forget_only_free(self, block, still_read=False):
    if block.next_free_block is not None:
        SegmentedFreeBlockQueue.forget(self, block, still_read)


def _forget_what_is_read(self, block, still_read=False):
    SegmentedFreeBlockQueue.forget(self, block)


FAULTS = [
    fault("no segments", append_n=FreeKVCacheBlockQueue.append_n),
    fault("a hit does not promote", promote=lambda self, blocks: None),
    fault("a lost hash does not requeue", forget=_forget_in_place),
    fault("a lost hash in use keeps its level", forget=_forget_only_free),
    fault("a block that is still read goes next", forget=_forget_what_is_read),
    fault("all levels are one", mark_probationary=_mark_lowest),
    fault("the null block is marked", mark_probationary=_mark_regardless),
    fault("popped ends are kept", _drop_popped_ends=lambda self: None),
    fault("end of a level stays behind", append_n=_after(
        "append_n", _insert_behind_the_end)),
    fault("one link back is missing", append_n=_after(
        "append_n", _insert_without_back_link)),
    fault("a probationary block is not counted", append_n=_after(
        "append_n", _insert_uncounted)),
    fault("end of free is kept by a removal", remove=_after(
        "remove", _keep_free_end)),
    fault("end of a level is kept by a removal", remove=_after(
        "remove", _keep_level_ends)),
    fault("end of free is not set", prepend_n=_after("prepend_n", _keep_free_end)),
    fault("reset keeps the levels", reset=_after("reset", _keep("_levels"))),
    fault("reset keeps the ends", reset=_after("reset", _keep("_ends"))),
    fault("the head's level is not told", eviction_level=lambda self: 0),
]  # fmt: skip


@pytest.fixture(scope="module")
def found(figure):
    """Names of the faults that were found."""
    names: list[str] = []
    yield names
    figure("queue faults planted", len(FAULTS))
    figure("queue faults found", len(names))


@pytest.mark.parametrize("queue", FAULTS)
def test_planted_fault_is_found(queue, found, request):
    class Machine(PoolMachine):
        queue_class = queue
        counts = Counter()

    with pytest.raises((AssertionError, RuntimeError, AttributeError)):
        run(Machine, STEPS_PER_RUN * 4000, derandomize=True, phases=[Phase.generate])
    found.append(request.node.callspec.id)
    print(f"found after {Machine.counts['steps']} steps")
