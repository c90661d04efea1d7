# SPDX-License-Identifier: Apache-2.0
"""Hit rate against pool size: every setting, every workload, both geometries."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_pr.bench.hashing import PieceHasher, merged
from vllm_pr.bench.workers import CHANGED, STOCK, Job, Workers
from vllm_pr.bench.workloads import Workload
from vllm_pr.scenarios import GEOMETRIES, Ask, Geometry

INTERVALS = (0, 1024, 4096, 16384, None)
QUICK_POOLS = (1, 2, 4)  # of six, by index
AIM = 0.99  # of the best stock setting, for changed at its default


@dataclass(frozen=True)
class Point:
    """One measured hit rate; JSON objects have these keys.

    Attributes:
        workload: its name.
        groups: name of the geometry.
        blocks: size of the pool.
        variant: "stock" or "changed".
        interval: retention interval in tokens, None for dense checkpoints.
        hit_rate: share of all prompt tokens that the prefix cache served.
        bound: what an unbounded pool with dense checkpoints serves.
    """

    workload: str
    groups: str
    blocks: int
    variant: str
    interval: int | None
    hit_rate: float
    bound: float

    @property
    def setting(self) -> str:
        return setting(self.variant, self.interval)

    @property
    def place(self) -> tuple[str, str, int]:
        return self.workload, self.groups, self.blocks


def setting(variant: str, interval: int | None) -> str:
    """A setting as it is shown to a reader."""
    return f"{variant} {'None' if interval is None else interval}"


def pools(workload: Workload, geometry: str, full: bool) -> list[int]:
    """Pool sizes of a sweep, in blocks."""
    sizes = workload.blocks[geometry]
    return list(sizes) if full else [sizes[index] for index in QUICK_POOLS]


def jobs(
    workloads: Sequence[Workload],
    full: bool,
    geometries: Iterable[str] = tuple(GEOMETRIES),
    **trace: object,
) -> list[Job]:
    """What a sweep measures: stock with all intervals, changed at its default.

    On the smallest pool of each workload, or with ``full`` on all of them, changed with
    every interval too: it must equal stock.
    """
    found: list[Job] = []
    for workload in workloads:
        for groups in geometries:
            for index, blocks in enumerate(pools(workload, groups, full)):
                place = {"workload": workload.name, "groups": groups, "blocks": blocks}
                place |= trace if workload.name == "trace" else {}
                changed = INTERVALS if full or index == 0 else (None,)
                for variant, intervals in ((STOCK, INTERVALS), (CHANGED, changed)):
                    found += [(variant, {**place, "interval": i}) for i in intervals]
    return found


def upper_bound(asks: Iterable[Ask], geometry: Geometry) -> float:
    """Hit rate of an unbounded pool with a checkpoint at every hit boundary.

    A hit ends at the last boundary up to which an earlier request computed the same
    tokens; of its own prompt, a request computes at least the last token.
    """
    alignment = math.lcm(*(group.block_size for group in geometry.groups))
    hasher = PieceHasher(alignment)
    seen: set[bytes] = set()
    prompt_tokens = hit_tokens = 0
    for ask in asks:
        hashes = hasher.hashes(merged((*ask.prompt, ask.output)))
        reach = (ask.prompt_tokens - 1) // alignment
        hits = sum(1 for boundary in hashes[:reach] if boundary in seen)
        hit_tokens += hits * alignment
        prompt_tokens += ask.prompt_tokens
        computed = ask.prompt_tokens + ask.output.tokens - 1
        seen.update(hashes[: computed // alignment])
    return hit_tokens / prompt_tokens


def run_sweep(
    workers: Workers,
    workloads: Sequence[Workload],
    full: bool,
    geometries: Iterable[str] = tuple(GEOMETRIES),
    on_point: Callable[[], None] = lambda: None,
    **trace: object,
) -> list[Point]:
    """Measure every setting on every pool of every workload.

    Args:
        workers: the processes that measure.
        workloads: what to serve.
        full: as for `jobs`.
        geometries: names of the geometries.
        on_point: called after each point.
        **trace: ``trace`` and ``requests``, where the trace is among the workloads.

    Raises:
        BenchError: a measurement failed.
    """
    bounds = {
        (workload.name, groups): upper_bound(workload.asks(), GEOMETRIES[groups])
        for workload in workloads
        for groups in geometries
    }
    planned = jobs(workloads, full, geometries, **trace)
    points = [
        Point(
            keywords["workload"],
            keywords["groups"],
            keywords["blocks"],
            variant,
            keywords["interval"],
            hit_rate,
            bounds[keywords["workload"], keywords["groups"]],
        )
        for (variant, keywords), hit_rate in workers.run_all("hits", planned, on_point)
    ]
    position = {_identity(job): index for index, job in enumerate(planned)}
    return sorted(points, key=lambda p: position[p.variant, *p.place, p.interval])


def _identity(job: tuple[str, dict]) -> tuple:
    variant, keywords = job
    return (
        variant,
        keywords["workload"],
        keywords["groups"],
        keywords["blocks"],
        keywords["interval"],
    )


def summed_up(points: Sequence[Point]) -> list[str]:
    """How changed compares with stock.

    At its default with the best stock setting of each pool, and with an explicit
    interval with the same.
    """
    stock = {(*p.place, p.interval): p.hit_rate for p in points if p.variant == STOCK}
    ratios = []
    explicit = []
    for point in points:
        if point.variant == STOCK:
            continue
        if point.interval is None:
            best = max(stock[*point.place, interval] for interval in INTERVALS)
            ratios.append(point.hit_rate / best if best else 1.0)
        else:
            explicit.append(point.hit_rate == stock[*point.place, point.interval])
    if not ratios:
        return []
    above = sum(ratio > 1 for ratio in ratios)
    below = sum(ratio < 1 for ratio in ratios)
    return [
        f"changed at its default against the best stock setting of each of "
        f"{len(ratios)} pools: above in {above}, equal in {len(ratios) - above - below}"
        f", below in {below}; ratio {min(ratios):.3f} to {max(ratios):.3f}",
        f"changed with an explicit interval: equal to stock with the same in "
        f"{sum(explicit)} of {len(explicit)} points",
    ]


def below_aims(points: Sequence[Point]) -> list[str]:
    """One line for each point where changed serves less than it should.

    At its default: `AIM` of the best stock setting, and stock with None. With an
    explicit interval: exactly what stock serves.
    """
    rates = {(*p.place, p.variant, p.interval): p.hit_rate for p in points}
    lines = []
    for point in points:
        if point.variant != CHANGED:
            continue
        stock = {i: rates.get((*point.place, STOCK, i), 0.0) for i in INTERVALS}
        where = f"{point.workload}, {point.groups}, {point.blocks:,} blocks"
        if point.interval is not None:
            if point.hit_rate != stock[point.interval]:
                lines.append(
                    f"{where}: {point.setting} {point.hit_rate:.4f}, "
                    f"stock {stock[point.interval]:.4f}: must be equal"
                )
            continue
        best = max(stock, key=lambda i: stock[i])
        if point.hit_rate < AIM * stock[best] or point.hit_rate < stock[None]:
            lines.append(
                f"{where}: {point.setting} {point.hit_rate:.4f}, "
                f"{setting(STOCK, best)} {stock[best]:.4f} "
                f"(ratio {point.hit_rate / stock[best]:.3f})"
            )
    return lines
