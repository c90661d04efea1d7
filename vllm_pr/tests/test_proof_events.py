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
    BlockRemoved,
    BlockStored,
    EventPublisher,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)
from vllm_pr.scenarios import DEEPSEEK_V4_FLASH, GEMMA

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
                sign = {BlockStored: 1, BlockRemoved: -1}[type(event)]
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
    engine = make_engine(GEOMETRIES[geometry], 40, interval, asynchronous=asynchronous)
    run_random(engine, seed=1, requests=60, resets=0.1, after_step=compare)
    counts = engine.scheduler.kv_event_publisher.counts
    assert engine.counts["hashes compared"] > 100
    assert min(counts[kind] for kind in ("BlockStored", "BlockRemoved")) > 10
    assert counts["AllBlocksCleared"]


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
        run_random(engine, seed=1, requests=60, resets=0.1, after_step=compare)
    assert swallowed


def count_events(geometry: str, interval) -> dict[str, float]:
    """Events for 1,000 prompt tokens: a session workload without resets."""
    engine = make_engine(
        COUNTED[geometry],
        60,
        interval,
        step_tokens=2048,
        max_model_len=32_768,
    )
    run_random(engine, seed=5, requests=60, aborts=0, resets=0, after_step=compare)
    counts = engine.scheduler.kv_event_publisher.counts
    thousands = sum(engine.prompts.values()) / 1000
    return {kind: round(number / thousands, 2) for kind, number in counts.items()}


def counted_elsewhere(tree: str, interval: object) -> dict[str, dict[str, float]]:
    """The counts of the vLLM in ``tree``, or of the installed one, by geometry."""
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(interval)],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [tree, root]))),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_events_per_thousand_prompt_tokens(figure):
    columns = {
        "stock, default": counted_elsewhere("", DEFAULT),
        "stock, interval None": counted_elsewhere("", None),
        "changed": {name: count_events(name, DEFAULT) for name in COUNTED},
    }
    for name in COUNTED:
        for column, counts in columns.items():
            figure(f"events per 1,000 prompt tokens, {name}, {column}", counts[name])
    for name in COUNTED:
        default, none, changed = (column[name] for column in columns.values())
        assert changed["BlockStored"] <= none["BlockStored"]


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    print(json.dumps({name: count_events(name, wanted) for name in COUNTED}))
