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


def serve_stale(worker: Worker, block: int, stale: int) -> None:
    """Let the hash of a cached block find another cached block instead.

    Args:
        worker: The engine's process.
        block: ID of the block whose hash is taken.
        stale: ID of the block that is served for it from now on; its own hash is
            forgotten.
    """
    pool = worker.core.scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({stale})
    pool.move_block_hashes(pool.blocks[block], pool.blocks[stale])
