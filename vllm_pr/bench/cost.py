# SPDX-License-Identifier: Apache-2.0
"""Cost of the change: both variants in turn, step by step, in one run."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from statistics import median, quantiles
from typing import Any

from vllm_pr.bench.workers import CHANGED, STOCK, Workers
from vllm_pr.scenarios import DEEPSEEK_V4_FLASH, GEMMA

STOCK_NONE, STOCK_ZERO = "stock None", "stock 0"
STEP_AIMS = {STOCK_NONE: 1.05, STOCK_ZERO: 1.15}
OFF_AIM = QUEUE_AIM = 1.05
QUEUE_BLOCKS = (10_000, 100_000, 1_000_000)
QUEUE_BATCHES = (1, 32, 1024)
UNHASHED = ("popleft_n", "prepend_n")
_CACHING = {
    STOCK_ZERO: (STOCK, {"interval": 0, "caching": True}),
    STOCK_NONE: (STOCK, {"interval": None, "caching": True}),
    CHANGED: (CHANGED, {"interval": None, "caching": True}),
}
_OFF = {
    STOCK: (STOCK, {"interval": None, "caching": False}),
    CHANGED: (CHANGED, {"interval": None, "caching": False}),
}


@dataclass
class Cost:
    """CPU time of one kind of step, for each setting; µs.

    Attributes:
        measure: what was timed.
        groups: name of the geometry.
        blocks: size of the pool.
        us: median, by setting.
        spread: first and third quartile, by setting.
        ratio: changed to each other setting: median of the pairs, or of a workload,
            whose requests differ, the whole.
        aims: the ratios that are wanted at most.
    """

    measure: str
    groups: str
    blocks: int
    us: dict[str, float]
    spread: dict[str, tuple[float, float]]
    ratio: dict[str, float]
    aims: dict[str, float] = field(default_factory=dict)

    @property
    def above_aims(self) -> list[str]:
        """One line for each ratio that is above its aim."""
        return [
            f"{self.measure}, {self.groups}, {self.blocks:,} blocks: changed takes "
            f"{self.ratio[other]:.2f} of {other}, wanted at most {aim:.2f}"
            for other, aim in self.aims.items()
            if self.ratio[other] > aim
        ]


@dataclass(frozen=True)
class Plan:
    """What to time: a job of the worker, its keywords, and the settings compared.

    With more than one pass, the shortest time of each step counts.
    """

    measure: str
    job: str
    groups: str
    blocks: int
    sides: dict[str, tuple[str, dict[str, Any]]]
    aims: dict[str, float]
    steps: int
    keywords: dict[str, Any] = field(default_factory=dict)
    passes: int = 1


def plans(full: bool, trace: dict[str, Any] | None = None) -> list[Plan]:
    """Everything that is timed on a manager.

    Args:
        full: more steps.
        trace: ``trace`` and ``requests`` of a trace to serve too.
    """
    steps = 200 if full else 60
    pools = {DEEPSEEK_V4_FLASH.name: 12_000, GEMMA.name: 24_000}
    found = []
    for groups, blocks in pools.items():
        for measure, job, size in (
            ("prefill step, 8,192 tokens", "prefill", blocks),
            ("decode step, 256 requests", "decode", 4 * blocks),
        ):
            for sides, aims, suffix in (
                (_CACHING, STEP_AIMS, ""),
                (_OFF, {STOCK: OFF_AIM}, ", caching off"),
            ):
                found.append(
                    Plan(measure + suffix, job, groups, size, sides, aims, steps)
                )
        found.append(_whole("session_switch", groups, blocks))
        found.append(_whole("short_chats", groups, blocks))
    if trace:
        found.append(_whole("trace", DEEPSEEK_V4_FLASH.name, 48_000, **trace))
    return found


def _whole(workload: str, groups: str, blocks: int, **trace: Any) -> Plan:
    return Plan(
        f"{workload}, 8 requests",
        "workload",
        groups,
        blocks,
        _CACHING,
        STEP_AIMS,
        steps=1 << 20,
        keywords={"workload": workload, **trace},
        passes=2,
    )


def measure_cost(workers: Workers, plan: Plan) -> Cost:
    """Time each setting of a plan, one step of each in turn.

    Raises:
        BenchError: a measurement failed.
    """
    passes = [_measure_pass(workers, plan) for _ in range(plan.passes)]
    samples = {
        side: [min(step) for step in zip(*(one[side] for one in passes), strict=True)]
        for side in plan.sides
    }
    return _summed_up(plan, samples)


def _measure_pass(workers: Workers, plan: Plan) -> dict[str, list[int]]:
    samples: dict[str, list[int]] = {side: [] for side in plan.sides}
    with ExitStack() as stack:
        steps = [
            stack.enter_context(workers.worker(variant)).steps(
                plan.job,
                groups=plan.groups,
                blocks=plan.blocks,
                **plan.keywords,
                **keywords,
            )
            for variant, keywords in plan.sides.values()
        ]
        for row in islice(zip(*steps, strict=True), plan.steps):
            for side, ns in zip(samples, row, strict=True):
                samples[side].append(ns)
        for step in steps:
            step.close()
    return samples


def _summed_up(plan: Plan, samples: dict[str, list[int]]) -> Cost:
    changed = samples[CHANGED]
    whole = plan.job == "workload"
    return Cost(
        plan.measure,
        plan.groups,
        plan.blocks,
        {side: median(ns) / 1000 for side, ns in samples.items()},
        {side: _quartiles(ns) for side, ns in samples.items()},
        {
            side: sum(changed) / sum(ns)
            if whole
            else median(c / s for c, s in zip(changed, ns, strict=True))
            for side, ns in samples.items()
            if side != CHANGED
        },
        plan.aims,
    )


def _quartiles(samples: Sequence[int]) -> tuple[float, float]:
    first, _, third = quantiles(samples, n=4)
    return first / 1000, third / 1000


def measure_queues(
    workers: Workers, full: bool, done: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Rows of the queue benchmark, both queues in turn in one process."""
    rows: list[dict[str, Any]] = []
    for blocks in QUEUE_BLOCKS if full else QUEUE_BLOCKS[1:2]:
        for batch in QUEUE_BATCHES:
            rows += workers.run(
                CHANGED,
                "queue",
                blocks=blocks,
                batch=batch,
                rounds=60 if full else 20,
                sample=8192,
            )
            done()
    return rows


def queues_above_aims(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each operation on blocks without a hash that takes too long."""
    return [
        f"{row['operation']}, {row['blocks']:,} blocks, {row['batch']} at once: "
        f"{row['ratio']:.2f} of stock, wanted at most {QUEUE_AIM:.2f}"
        for row in rows
        if row["operation"] in UNHASHED and row["ratio"] > QUEUE_AIM
    ]


def measure_events(
    workers: Workers, done: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """KV events per 1,000 prompt tokens of two workloads."""
    pools = ((DEEPSEEK_V4_FLASH.name, 12_000), (GEMMA.name, 24_000))
    rows = [
        {"workload": workload, "groups": groups, "blocks": blocks, "setting": side}
        for workload in ("session_switch", "short_chats")
        for groups, blocks in pools
        for side in _CACHING
    ]
    for row in rows:
        variant, keywords = _CACHING[row["setting"]]
        place = {name: row[name] for name in ("workload", "groups", "blocks")}
        row |= workers.run(variant, "events", **place, interval=keywords["interval"])
        done()
    return rows


def measure_memory(workers: Workers, blocks: int = 1_000_000) -> dict[str, float]:
    """Resident bytes a block of a pool, by variant.

    In processes that have freed nothing yet: what is freed would be used again.
    """
    with workers.fresh() as fresh:
        return {
            variant: fresh.run(variant, "memory", blocks=blocks)["bytes_per_block"]
            for variant in (STOCK, CHANGED)
        }
