# SPDX-License-Identifier: Apache-2.0
"""A real ``Scheduler`` under load: no block lost, none reused while it is read.

Random sessions with preemption, aborts in the middle of a prefill, resets of the
prefix cache, evictions as after a failed load, a step in flight, and a host offload
whose copies come at the worst times. After every step the pool is checked against all
who may hold a block, and the free queue against its order; every slot that a step reads
must hold what the request needs (``scheduler_kit``).
"""

import pytest
from proof_kit import GEOMETRIES
from scheduler_kit import PAGE, Engine, Setup, WrongContent, pool_blocks, run_random

from vllm.v1.core.free_block_queue import SegmentedFreeBlockQueue
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm_pr.driver import block_sizes

# Hit boundaries that fit into the pool: prompts have ten, six run at once. With a host
# offload fewer, so that there is something to load.
UNITS, OFFLOAD_UNITS = 40, 25
PLAIN = (
    "full+sliding",
    "windows",
    "full+mamba+sliding",
    "mla+windows",
    "gemma-small",
    "full+chunked",
)
OFFLOADED = ("full+sliding", "gemma-small", "mla+windows")
# Where the walk meets checkpoints on probation.
WALKED = ("full+sliding", "mla+windows")
SIDES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def make_engine(name: str, interval=None, offload: str = "", **setup) -> Engine:
    """An engine on a small pool; ``offload`` is "", "lazy" or "eager"."""
    geometry = GEOMETRIES[name]
    blocks = pool_blocks(geometry, OFFLOAD_UNITS if offload else UNITS)
    if offload:
        setup["connector"] = {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": 3 * blocks * PAGE,
                "lazy_offload": offload == "lazy",
            },
        }
    setup.setdefault("step_tokens", 4 * block_sizes(geometry)[0])
    return Engine(Setup(geometry, blocks, interval, **setup))


def run(engine: Engine, evictions: float = 0.0) -> None:
    """Two runs, and in between, with nothing running, a reset that must succeed."""
    more = {"aborts": 0.08, "resets": 0.04, "evictions": evictions}
    run_random(engine, seed=3, requests=100, **more)
    assert engine.reset(running=False)
    run_random(engine, seed=4, requests=60, **more)


def assert_all_happened(engine: Engine) -> None:
    """The run had in it what it is for."""
    assert engine.worker.counts["preempted"]
    assert sum(engine.cached.values())
    for what in (
        "aborted mid-prefill",
        "aborted other",
        "reset with running: True",
        "reset without running: False",
        "evicted",
    ):
        assert engine.counts[what], what


@SIDES
@pytest.mark.parametrize("interval", [None, 0])
@pytest.mark.parametrize("geometry", PLAIN)
def test_no_block_is_lost_or_reused(geometry, interval, asynchronous):
    engine = make_engine(geometry, interval, asynchronous=asynchronous)
    run(engine, evictions=0.05)
    assert_all_happened(engine)


@SIDES
@pytest.mark.parametrize("offload", ["lazy", "eager"])
@pytest.mark.parametrize("geometry", OFFLOADED)
def test_no_block_is_reused_while_it_is_copied(geometry, offload, asynchronous):
    engine = make_engine(geometry, None, offload, asynchronous=asynchronous)
    run(engine)
    assert engine.worker.counts["preempted"] and engine.counts["aborted mid-prefill"]
    assert bool(engine.counts["deferred frees"]) == asynchronous
    copies = engine.worker.offload.counts
    assert min(copies["blocks stored"], copies["blocks loaded"]) > 20


class WatchedWalk:
    """The lazy offload's walk, beside what it should have copied."""

    def __init__(self, engine: Engine) -> None:
        self.manager = engine.scheduler.connector.scheduler_manager
        self.walk = self.manager._prepare_lazy_store_specs
        self.manager._prepare_lazy_store_specs = self
        self.queue = engine.pool.free_block_queue
        self.copied = self.on_probation = 0

    def __call__(self):
        manager, host = self.manager, self.manager.cpu_block_pool
        cursor, free = manager._cursor, self.queue.get_all_free_blocks()
        start = free.index(cursor) + 1 if cursor in free else 0
        ahead = free[start : start + manager._target_free]
        room, wanted = host.get_num_free_blocks(), []
        for block in ahead:
            key = block.block_hash
            if len(wanted) == room:
                break
            if key is None or host.cached_block_hash_to_block.get_one_block(key):
                continue
            wanted.append(block.block_id)
            self.on_probation += bool(self.queue._levels[block.block_id])
        result = self.walk()
        assert result[0] == wanted
        self.copied += len(wanted)
        return result


@SIDES
@pytest.mark.parametrize("geometry", WALKED)
def test_lazy_offload_walks_in_eviction_order(geometry, asynchronous):
    """It copies what is evicted next, checkpoints on probation first."""
    engine = make_engine(geometry, None, "lazy", asynchronous=asynchronous)
    watched = WatchedWalk(engine)
    run_random(engine, seed=4, requests=120, aborts=0, resets=0)
    assert watched.copied > 50 and watched.on_probation > 10


def _forget_in_place(queue, block, still_read=False) -> None:
    queue._levels[block.block_id] = 0


def _hit_uncounted(queue, block, remove=SegmentedFreeBlockQueue.remove) -> None:
    remove(queue, block)
    queue.num_free_blocks += 1


def _copy_unpinned(manager, step, specs=SimpleCPUOffloadScheduler.prepare_store_specs):
    found = specs(manager, step)
    pool = manager._gpu_block_pool
    pool.free_blocks(pool.blocks[block] for block in found[0])
    return found


FAULTS = {
    "a hit still counts as free": (
        SegmentedFreeBlockQueue, "remove", _hit_uncounted),
    "an evicted block stays where it is": (
        SegmentedFreeBlockQueue, "forget", _forget_in_place),
    "one LRU list": (
        SegmentedFreeBlockQueue, "append_n", FreeKVCacheBlockQueue.append_n),
    "what is being copied is not held": (
        SimpleCPUOffloadScheduler, "prepare_store_specs", _copy_unpinned),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault, monkeypatch):
    plain = FAULTS[fault][0] is SegmentedFreeBlockQueue
    engine = make_engine("full+sliding", None, "" if plain else "eager")
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        run(engine, evictions=0.05 if plain else 0)


def test_planted_fault_is_found_by_content(monkeypatch):
    """Blocks that a step in flight still writes are freed, and a load comes first."""
    engine = make_engine("full+sliding", None, "eager", asynchronous=True)
    monkeypatch.setattr(Scheduler, "_request_blocks_can_be_freed", lambda *_: True)
    with pytest.raises(WrongContent):
        run(engine)


def test_planted_fault_in_the_walk_is_found(monkeypatch):
    """A lazy offload that leaves out every checkpoint on probation."""
    engine = make_engine("full+sliding", None, "lazy")
    watched = WatchedWalk(engine)
    queue, walk = engine.pool.free_block_queue, watched.walk

    def leave_out():
        found = walk()
        return ([b for b in found[0] if not queue._levels[b]], *found[1:])

    watched.walk = leave_out
    monkeypatch.setattr(engine, "check", lambda: None)
    with pytest.raises(AssertionError):
        run_random(engine, seed=4, requests=120, aborts=0, resets=0)
