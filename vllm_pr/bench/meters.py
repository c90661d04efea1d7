# SPDX-License-Identifier: Apache-2.0
"""What a worker measures: hits, CPU time, KV events and memory.

Everything here runs in a worker, on the vLLM that is first on its path. Times are CPU
times of the process, with the heap frozen and the garbage collector on, as in the
engine.
"""

import gc
import importlib.util
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from statistics import median
from time import process_time_ns
from types import ModuleType
from typing import Any

from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.core.block_pool import BlockPool
from vllm_pr.bench.replay import Replay
from vllm_pr.bench.trace import read_trace
from vllm_pr.bench.workloads import WORKLOADS, returning_sessions
from vllm_pr.scenarios import GEOMETRIES, Ask, Text

SHA256_BYTES = 32
CHUNK_TOKENS = 8192
_SCRIPT = (
    Path(__file__).resolve().parents[2] / "benchmarks/benchmark_free_block_queue.py"
)
# What a scheduler calls on the way of a request from its arrival to its end.
_CALLS = ("get_computed_blocks", "allocate_slots", "new_step_starts", "free")


def queue_benchmark() -> ModuleType:
    """The benchmark that goes upstream, as a module."""
    spec = importlib.util.spec_from_file_location(_SCRIPT.stem, _SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure_hits(
    workload: str,
    groups: str,
    blocks: int,
    interval: int | None,
    trace: str = "",
    requests: int = 0,
) -> float:
    """Hit rate of a workload, or of the first ``requests`` requests of a trace."""
    asks = _asks(workload, trace, requests)
    return Replay(GEOMETRIES[groups], blocks, interval).hit_rate(asks)


def _asks(workload: str, trace: str, requests: int) -> list[Ask]:
    return read_trace(Path(trace), requests) if trace else WORKLOADS[workload].asks()


def measure_queue(blocks: int, batch: int, rounds: int, sample: int) -> list[dict]:
    """Rows of the queue benchmark; needs *changed*, which holds both queues."""
    return queue_benchmark().measure(blocks, batch, rounds, sample)


class Stopwatch:
    """Adds up the CPU time spent in an object's methods, in ns."""

    def __init__(self) -> None:
        self.total = 0

    def watch(self, target: Any, *names: str) -> None:
        """Time each call of the named methods of ``target`` that exist."""
        for name in names:
            if hasattr(target, name):
                setattr(target, name, self._timed(getattr(target, name)))

    def take(self) -> int:
        """The time since the last call."""
        total, self.total = self.total, 0
        return total

    def _timed(self, method: Callable) -> Callable:
        @wraps(method)  # The driver asks for the signature.
        def timed(*args: Any, **keywords: Any) -> Any:
            start = process_time_ns()
            try:
                return method(*args, **keywords)
            finally:
                self.total += process_time_ns() - start

        return timed


@contextmanager
def engine_heap() -> Iterator[None]:
    """Garbage collection as in the engine: what exists now is never looked at."""
    freeze_gc_heap()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()


def _timed_replay(
    groups: str, blocks: int, interval: int | None, caching: bool
) -> tuple[Replay, Stopwatch]:
    replay = Replay(
        GEOMETRIES[groups],
        blocks,
        interval,
        hash_bytes=SHA256_BYTES,
        chunk_tokens=CHUNK_TOKENS,
        enable_caching=caching,
    )
    stopwatch = Stopwatch()
    stopwatch.watch(replay.driver.manager, *_CALLS)
    return replay, stopwatch


def measure_workload(
    workload: str,
    groups: str,
    blocks: int,
    interval: int | None,
    caching: bool,
    trace: str = "",
    requests: int = 0,
    every: int = 8,
) -> Iterator[int]:
    """CPU time in ns that each ``every`` requests of a workload take in the manager."""
    asks = _asks(workload, trace, requests)
    replay, stopwatch = _timed_replay(groups, blocks, interval, caching)
    with engine_heap():
        for first in range(0, len(asks), every):
            for ask in asks[first : first + every]:
                replay.serve(ask)
            yield stopwatch.take()


def measure_prefill(
    groups: str, blocks: int, interval: int | None, caching: bool
) -> Iterator[int]:
    """CPU time in ns of scheduler steps of 8,192 prompt tokens.

    Prompts of twelve steps follow each other, on a pool that has turned over: what
    they keep for ever, their full-attention blocks, has filled it.
    """
    tokens = 12 * CHUNK_TOKENS
    kept = sum(
        tokens // g.block_size for g in GEOMETRIES[groups].groups if not g.window
    )
    replay, stopwatch = _timed_replay(groups, blocks, interval, caching)
    with engine_heap():
        for prompt in itertools.count():
            text = Text(f"prompt {prompt}", tokens)
            for scheduled in _serve(replay, text):
                step = stopwatch.take()
                if scheduled == CHUNK_TOKENS and prompt * kept > blocks:
                    yield step


def measure_decode(
    groups: str, blocks: int, interval: int | None, caching: bool, requests: int = 256
) -> Iterator[int]:
    """CPU time in ns of steps in which each of ``requests`` requests gets a token."""
    replay, stopwatch = _timed_replay(groups, blocks, interval, caching)
    running = []
    with engine_heap():
        for i in range(requests):
            request = _serve(replay, Text(f"running {i}", 1000 + i), 1 << 16)
            next(request)
            next(request)  # Gives back what the window has passed.
            running.append(request)
        stopwatch.take()
        while True:
            for request in running:
                next(request)
            yield stopwatch.take()


def _serve(replay: Replay, prompt: Text, output: int = 1) -> Iterator[int]:
    driver = replay.driver
    request_id = prompt.key
    replay.hasher.expect(request_id, (prompt, Text(f"{request_id} output", output)))
    request = driver.request([0] * prompt.tokens, request_id)
    return driver.steps(request, [0] * output)


def measure_scale(
    groups: str, blocks: int, sessions: int, tokens: int, returns: int, parts: int = 10
) -> dict[str, Any]:
    """Serve long or many sessions with dense checkpoints.

    Returns:
        ``hit_rate`` of the returns, ``peak_blocks``, and ``us_per_step``: median CPU
        time of a full prefill step in each of ``parts`` equal parts of the first
        visits.
    """
    first, returned = [], []
    replay, stopwatch = _timed_replay(groups, blocks, None, caching=True)
    times: list[int] = []

    def on_step(scheduled: int) -> None:
        step = stopwatch.take()
        if scheduled == CHUNK_TOKENS and len(first) < sessions:
            times.append(step)

    with engine_heap():
        for ask in returning_sessions(sessions, tokens, returns):
            visits = first if len(first) < sessions else returned
            visits.append(replay.serve(ask, on_step))
    size = len(times) // parts
    return {
        "hit_rate": sum(one.cached_tokens for one in returned)
        / sum(one.prompt_tokens for one in returned),
        "peak_blocks": max(one.peak_blocks for one in first + returned),
        "us_per_step": [
            median(times[part * size : (part + 1) * size]) / 1000
            for part in range(parts)
        ],
    }


def measure_events(
    workload: str, groups: str, blocks: int, interval: int | None
) -> dict[str, float]:
    """KV events per 1,000 prompt tokens: events, and hashes that they name."""
    replay = Replay(GEOMETRIES[groups], blocks, interval, enable_kv_cache_events=True)
    counts: defaultdict[str, int] = defaultdict(int)
    tokens = 0
    for ask in WORKLOADS[workload].asks():
        tokens += replay.serve(ask).prompt_tokens
        for event in replay.driver.manager.take_events():
            counts["events"] += 1
            counts[type(event).__name__] += len(event.block_hashes)
    return {name: 1000 * count / tokens for name, count in counts.items()}


def measure_memory(blocks: int) -> dict[str, float]:
    """Resident memory of a pool of ``blocks`` blocks, bytes a block."""
    gc.collect()
    before = _resident_bytes()
    pool = BlockPool(blocks, enable_caching=True, hash_block_size=16)
    after = _resident_bytes()
    return {"bytes_per_block": (after - before) / pool.num_gpu_blocks}


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
