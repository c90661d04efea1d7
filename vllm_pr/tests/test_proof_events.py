# SPDX-License-Identifier: Apache-2.0
"""KV events mirror the pool's hash map, and how many of them there are.

A router indexes what workers have cached by nothing but `BlockStored`, `BlockRemoved`
and `AllBlocksCleared`. A mirror fed by them must equal the pool's hash map after every
scheduler step of a random workload with aborts, resets and preemption.

``python vllm_pr/tests/test_proof_events.py`` is the worker that counts the events of
the vLLM that is first on the path.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from proof_kit import GEOMETRIES
from scheduler_kit import DEFAULT, Engine, Setup, pool_blocks, run_random

from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockStored,
    EventPublisher,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)
from vllm_pr.driver import block_sizes
from vllm_pr.scenarios import DEEPSEEK_V4_FLASH, GEMMA

KINDS = ("BlockStored", "BlockRemoved", "hashes stored", "hashes removed")
POOLS = {"full": 24, "ample": 300}  # hit boundaries that fit
COUNTED = {DEEPSEEK_V4_FLASH.name: DEEPSEEK_V4_FLASH, GEMMA.name: GEMMA}


class Mirror(EventPublisher):
    """What a router knows: how many blocks are cached under each hash."""

    def __init__(self) -> None:
        super().__init__()
        self.index: Counter = Counter()
        self.counts: Counter = Counter()

    def publish(self, events) -> None:
        for event in events.events:
            if isinstance(event, AllBlocksCleared):
                self.index.clear()
            elif event.medium == MEDIUM_GPU:
                stored = isinstance(event, BlockStored)
                sign = 1 if stored else -1
                which = "hashes stored" if stored else "hashes removed"
                self.counts[which] += len(event.block_hashes)
                for block_hash in event.block_hashes:
                    self.index[event.group_idx, block_hash] += sign
            self.counts[type(event).__name__] += 1

    def shutdown(self) -> None:
        pass


def hash_map(pool: BlockPool) -> Counter:
    """How many blocks the pool has cached under each hash."""
    held: Counter = Counter()
    for key, blocks in pool.cached_block_hash_to_block._cache.items():
        external = maybe_convert_block_hash(get_block_hash(key))
        held[get_group_id(key), external] += len(blocks) if type(blocks) is dict else 1
    return held


def make_engine(geometry, units: int, interval=DEFAULT, **setup) -> Engine:
    setup.setdefault("step_tokens", 8 * block_sizes(geometry)[0])
    engine = Engine(
        Setup(
            geometry,
            pool_blocks(geometry, units),
            interval,
            events={"enable_kv_cache_events": True, "publisher": "null"},
            **setup,
        )
    )
    engine.scheduler.kv_event_publisher = Mirror()
    # The events of a step are published when its results come in.
    engine.after_update = compare
    return engine


def compare(engine: Engine) -> None:
    mirror = engine.scheduler.kv_event_publisher
    assert +mirror.index == hash_map(engine.pool)
    assert min(mirror.index.values(), default=0) >= 0
    engine.counts["compared"] += 1
    engine.counts["hashes compared"] += len(mirror.index)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("interval", [None, 0])
@pytest.mark.parametrize("geometry", [*sorted(GEOMETRIES.keys() - COUNTED.keys())])
def test_mirror_equals_the_hash_map(geometry, interval, asynchronous):
    engine = make_engine(GEOMETRIES[geometry], 24, interval, asynchronous=asynchronous)
    run_random(engine, seed=1, requests=150, resets=0.03)
    counts = engine.scheduler.kv_event_publisher.counts
    assert engine.counts["hashes compared"] > 1000
    assert min(counts[kind] for kind in ("BlockStored", "BlockRemoved")) > 10
    assert counts["AllBlocksCleared"]
    assert engine.worker.counts["preempted"] and engine.counts["aborted"]


@pytest.mark.parametrize("kind", ["BlockStored", "BlockRemoved", "AllBlocksCleared"])
def test_planted_fault_is_found(kind):
    """A pool that keeps one event of a kind to itself."""
    engine = make_engine(GEOMETRIES["full+sliding"], 40, None)
    publish = engine.scheduler.kv_event_publisher.publish
    swallowed = []

    def lossy(batch) -> None:
        for event in [e for e in batch.events if type(e).__name__ == kind]:
            if not swallowed:
                swallowed.append(event)
                batch.events.remove(event)
        publish(batch)

    engine.scheduler.kv_event_publisher.publish = lossy
    with pytest.raises(AssertionError):
        run_random(engine, seed=1, requests=150, resets=0.03)
    assert swallowed


def count_events(geometry: str, interval, units: int) -> dict[str, float]:
    """Events, and hashes in them, for 1,000 prompt tokens; no resets, no aborts."""
    step = 2 * block_sizes(COUNTED[geometry])[0]
    engine = make_engine(
        COUNTED[geometry], units, interval, step_tokens=step, max_model_len=32_768
    )
    run_random(engine, seed=5, requests=60, aborts=0, resets=0)
    counts = engine.scheduler.kv_event_publisher.counts
    thousands = sum(map(len, engine.prompts.values())) / 1000
    return {kind: round(counts[kind] / thousands, 2) for kind in KINDS}


def count_all(interval) -> dict[str, dict[str, float]]:
    """The counts by geometry and pool."""
    return {
        f"{name}, {pool} pool": count_events(name, interval, units)
        for name in COUNTED
        for pool, units in POOLS.items()
    }


def counted_by_stock(interval: object) -> dict[str, dict[str, float]]:
    """The counts of the installed vLLM."""
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(interval)],
        env=dict(os.environ, PYTHONPATH=root),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_events_per_thousand_prompt_tokens(figure):
    """The same events as with stock's None, until blocks have to go."""
    default, none = counted_by_stock(DEFAULT), counted_by_stock(None)
    changed = count_all(DEFAULT)
    for name in changed:
        for side, counts in (
            ("stock, default", default),
            ("stock, interval None", none),
            ("changed", changed),
        ):
            figure(f"per 1,000 prompt tokens, {name}, {side}", counts[name])
    for name in COUNTED:
        ample, full = f"{name}, ample pool", f"{name}, full pool"
        assert changed[ample] == none[ample] != default[ample]
        assert changed[full]["BlockRemoved"]


if __name__ == "__main__":
    print(json.dumps(count_all(json.loads(sys.argv[1]))))
