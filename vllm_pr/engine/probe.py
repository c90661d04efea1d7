# SPDX-License-Identifier: Apache-2.0
"""Functions for ``Engine.call``: they look into the engine's process, or break it."""

from unittest import mock

from vllm_pr.engine.worker import Worker


def preemptions(worker: Worker) -> int:
    """How often a request was preempted since the engine started."""
    return sum(
        metric.value
        for metric in worker.llm.get_metrics()
        if metric.name == "vllm:num_preemptions"
    )


def hit_blocks(worker: Worker, prompt: list[int]) -> list[list[int]]:
    """Send a prompt; return the block IDs of its prefix-cache hit, by group."""
    from vllm.v1.core.kv_cache_utils import get_group_id

    manager = worker.core.scheduler.kv_cache_manager
    pool = manager.block_pool
    hit: list[list[int]] = [[] for _ in manager.kv_cache_config.kv_cache_groups]
    stock_touch = pool.touch

    def touch(blocks) -> None:
        for block in blocks:
            if not block.is_null:
                hit[get_group_id(block.block_hash)].append(block.block_id)
        stock_touch(blocks)

    with mock.patch.object(pool, "touch", touch):
        worker.do_ask([prompt], [1], None)
    return hit


def swap_blocks(worker: Worker, one: int, other: int) -> None:
    """Exchange the hashes of two cached blocks: each is served for the other.

    The same call again undoes it; no block changes its place in the free queue.

    Args:
        worker: The engine's process.
        one: ID of a block with a hash.
        other: ID of another one, of the same group.
    """
    pool = worker.core.scheduler.kv_cache_manager.block_pool
    table = pool.cached_block_hash_to_block
    blocks = pool.blocks[one], pool.blocks[other]
    hashes = [(block.block_hash, block.block_hash_num_tokens) for block in blocks]
    for block in blocks:
        table.pop(block.block_hash, block.block_id)
        block.reset_hash()
    for block, (block_hash, tokens) in zip(reversed(blocks), hashes, strict=True):
        block.set_block_hash(block_hash, num_tokens=tokens)
        table.insert(block_hash, block)
