# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Segmented free queue: what is handed out first is what nobody will miss."""

from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

# The top level spaces checkpoints by 2**11 hit boundaries: 64k tokens where one is 32.
NUM_PROBATIONARY_LEVELS = 12


class SegmentedFreeBlockQueue(FreeKVCacheBlockQueue):
    """Free queue whose eviction order is free, probationary, protected.

    One chain, after the segmented LRU of Karedla, Love and Wherry (Computer 27(3),
    1994), but with no bound on the protected segment:

    1. *free*: blocks without a hash, LIFO.
    2. *probationary*: speculative checkpoints that no request has hit yet, in
       `NUM_PROBATIONARY_LEVELS` levels, lowest level first, FIFO within a level.
    3. *protected*: every other hashed block, LRU.

    Popping is inherited: the chain itself is in eviction order. The queue adds one
    byte a block, its level (1 and up for probationary blocks, else 0), and the last
    block of the first segment and of each level. Every operation is O(1) per block.

    A pop does not maintain the segment ends, so an end may be a block that has been
    popped since. Pops are from the head: the segment of such a block is empty, and
    `_drop_popped_ends` finds out before anything is inserted again.

    Args:
        blocks: All blocks of the pool, in order of block ID.

    """

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        super().__init__(blocks)
        # One more byte than blocks: both fake ends have block ID -1.
        self._levels = bytearray(len(blocks) + 1)
        # Index 0 is the free segment: never None, the fake head if it is empty.
        self._ends: list[KVCacheBlock | None]
        self._ends = [self._last_block(), *[None] * NUM_PROBATIONARY_LEVELS]

    def mark_probationary(
        self, blocks: Sequence[KVCacheBlock], levels: Sequence[int]
    ) -> None:
        """Let blocks in use be freed as probationary.

        Args:
            blocks: Blocks that are not in the queue, and have a hash by the time
                they are freed. Null blocks stay as they are.
            levels: Level of each block, 1 to `NUM_PROBATIONARY_LEVELS`; 0 leaves
                the block protected.

        """
        for block, level in compress(zip(blocks, levels), levels):
            if not block.is_null:
                self._levels[block.block_id] = level

    def eviction_level(self) -> int:
        """Level of the block that is evicted next.

        Returns:
            0 if it has no hash (or no block is free), and
            `NUM_PROBATIONARY_LEVELS` + 1 if it is protected.

        """
        head = self.fake_free_list_head.next_free_block
        assert head is not None
        if head.block_hash is None:
            return 0
        return self._levels[head.block_id] or NUM_PROBATIONARY_LEVELS + 1

    def is_protected(self, block: KVCacheBlock) -> bool:
        """Whether a block has a hash and is, or will be freed as, protected."""
        return block.block_hash is not None and not self._levels[block.block_id]

    def promote(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let blocks that are not in the queue be freed as protected."""
        for block in blocks:
            self._levels[block.block_id] = 0

    def forget(self, block: KVCacheBlock, still_read: bool = False) -> None:
        """Note that a block lost its hash; if it is free, it is the next to go.

        Args:
            block: The block, free or in use.
            still_read: Its content is still being read: make it the last to go.

        """
        is_free = block.next_free_block is not None
        if is_free:
            self.remove(block)
        self._levels[block.block_id] = 0
        if is_free:
            put_back = self.append_n if still_read else self.prepend_n
            put_back([block])

    def reset(self) -> None:
        """Note that no block has a hash any more: all free blocks are equal."""
        self._levels = bytearray(len(self._levels))
        self._ends = [self._last_block(), *[None] * NUM_PROBATIONARY_LEVELS]

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out of the middle of the queue, as on a hit.

        Raises:
            RuntimeError: If the block is not in the queue.

        """
        prev_block = block.prev_free_block
        super().remove(block)
        level = self._levels[block.block_id]
        if self._ends[level] is block:
            assert prev_block is not None
            same_level = self._levels[prev_block.block_id] == level
            self._ends[level] = prev_block if same_level else None

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the end of its segment."""
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put blocks at the end of their segments, in the given order."""
        if not blocks:
            return
        self._drop_popped_ends()
        levels, ends = self._levels, self._ends
        for block in blocks:
            if levels[block.block_id]:
                break
        else:
            super().append_n(blocks)
            return
        protected = []
        for block in blocks:
            level = levels[block.block_id]
            if not level:
                protected.append(block)
                continue
            prev_block = ends[level] or self._end_below(level)
            next_block = prev_block.next_free_block
            assert next_block is not None
            prev_block.next_free_block = next_block.prev_free_block = block
            block.prev_free_block = prev_block
            block.next_free_block = next_block
            ends[level] = block
        self.num_free_blocks += len(blocks) - len(protected)
        super().append_n(protected)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put blocks without a hash at the front of the queue."""
        if not blocks:
            return
        end = self._ends[0]
        assert end is not None
        if end is self.fake_free_list_head or end.next_free_block is None:
            self._drop_popped_ends()
            self._ends[0] = blocks[-1]
        super().prepend_n(blocks)

    def _last_block(self) -> KVCacheBlock:
        last_block = self.fake_free_list_tail.prev_free_block
        assert last_block is not None
        return last_block

    def _end_below(self, level: int) -> KVCacheBlock:
        return next(end for end in self._ends[level - 1 :: -1] if end is not None)

    def _drop_popped_ends(self) -> None:
        for level, end in enumerate(self._ends):
            if end is None or end is self.fake_free_list_head:
                continue
            if end.next_free_block is not None:
                return
            self._ends[level] = None if level else self.fake_free_list_head


def checkpoint_levels(
    start_block: int,
    end_block: int,
    blocks_per_boundary: int,
    blocks_per_hit: int,
    shift: int,
) -> bytearray:
    """Levels of a group's blocks for aligned thinning of dense checkpoints.

    The n-th hit boundary has level 1 plus the number of trailing zero bits of n, at
    most `NUM_PROBATIONARY_LEVELS`; a block has the highest level among the
    boundaries whose hit needs it. Evicting the lowest level first doubles the
    spacing of the checkpoints that remain.

    Args:
        start_block: First block of the range, an index into the request's blocks.
        end_block: End of the range, exclusive.
        blocks_per_boundary: Blocks from one hit boundary to the next.
        blocks_per_hit: Contiguous blocks that a hit at a boundary needs.
        shift: Blocks that a hit reads past its boundary (EAGLE: 1).

    Returns:
        One level a block of the range; 0 for blocks that no boundary needs.

    """
    levels = bytearray(end_block - start_block)
    step = blocks_per_boundary
    for level in range(1, NUM_PROBATIONARY_LEVELS + 1):
        if 2 * step + shift <= blocks_per_hit and level < NUM_PROBATIONARY_LEVELS:
            step *= 2  # Every block has a higher level: those windows overlap.
            continue
        boundary = max(step, -(-(start_block - shift) // step) * step)
        if boundary + shift - blocks_per_hit >= end_block:
            break  # Nor is there a boundary of a higher level.
        while (first := boundary + shift - blocks_per_hit) < end_block:
            first = max(first, start_block)
            last = min(boundary + shift, end_block)
            levels[first - start_block : last - start_block] = bytes(
                [level] * (last - first)
            )
            boundary += step
        step *= 2
    return levels


def put_on_probation(
    manager: "SingleTypeKVCacheManager",
    request: Request,
    start_block: int,
    end_block: int,
    reachable_boundaries: Sequence[int],
    block_mask: list[bool] | None,
) -> list[bool] | None:
    """Mark as probationary what interval None caches and interval 0 would not.

    A checkpoint that the same prefill is about to evict again is not cached at all:
    its level is below the one that is being evicted, at least as many prompt tokens
    are still to come as this step has computed, and it is not the step's last.

    Args:
        manager: The group's manager. Only a sliding-window group has dense
            checkpoints to mark; others are left alone.
        request: The request whose blocks are about to be cached.
        start_block: First of them, an index into the request's blocks.
        end_block: End of them, exclusive.
        reachable_boundaries: Replay boundaries and junctions, in tokens.
        block_mask: What interval None caches of them; None means all.

    Returns:
        What to cache of them, as `block_mask`.

    """
    spec = manager.kv_cache_spec
    if not isinstance(spec, SlidingWindowSpec):
        return block_mask
    if block_mask is not None and not any(block_mask):
        return block_mask
    alignment = manager.cache_hit_alignment_tokens
    protected = manager.reachable_block_mask(
        start_block=start_block,
        end_block=end_block,
        alignment_tokens=alignment,
        kv_cache_spec=spec,
        use_eagle=manager.use_eagle,
        retention_interval=0,
        reachable_boundaries=reachable_boundaries,
        dcp_world_size=manager.dcp_world_size,
    )
    if protected is None:
        return block_mask
    blocks_per_boundary = alignment // manager.block_size
    # The window before a boundary and, with EAGLE, the block after it.
    shift = int(manager.use_eagle)
    blocks_per_hit = cdiv(spec.sliding_window - 1, manager.block_size) + shift
    levels = checkpoint_levels(
        start_block, end_block, blocks_per_boundary, blocks_per_hit, shift
    )
    positions = range(len(levels))
    for i in compress(positions, protected):
        levels[i] = 0
    queue = manager.block_pool.free_block_queue
    blocks = manager.req_to_blocks[request.request_id]
    if shift and start_block and queue.is_protected(blocks[start_block - 1]):
        levels[0] = 0  # The last block of what was hit, which EAGLE has recomputed.
    num_blocks_left = request.num_prompt_tokens // manager.block_size - end_block
    if num_blocks_left >= len(levels) and (evicted := queue.eviction_level()):
        block_mask = block_mask or [True] * len(levels)
        # What the last boundary needs stays: a prefill cut short resumes there.
        last_boundary = (end_block - shift) // blocks_per_boundary * blocks_per_boundary
        last_hit = max(0, last_boundary + shift - blocks_per_hit - start_block)
        for i in compress(positions[:last_hit], levels):
            if levels[i] < evicted:
                levels[i] = 0
                block_mask[i] = False
    queue.mark_probationary(blocks[start_block:end_block], levels)
    return block_mask
