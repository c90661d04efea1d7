# SPDX-License-Identifier: Apache-2.0
"""``vllm-pr bench``: run the benchmarks, print tables, write JSON and plots."""

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from vllm_pr.outputs import Console, JsonFile, writable

TRACE_REQUESTS = 600
PLAIN_WIDTH = 130  # of a table, where there is no terminal
COST_REQUESTS = 300  # of the trace, where its cost is measured


class Part(StrEnum):
    """A part of the benchmarks."""

    HITS = "hits"
    COST = "cost"
    TTFT = "ttft"
    SCALE = "scale"


@dataclass
class Results:
    """Everything measured, as it is written to JSON."""

    release: str
    full: bool
    hit_rates: list[dict] = field(default_factory=list)
    cost: list[dict] = field(default_factory=list)
    queue: list[dict] = field(default_factory=list)
    events: list[dict] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)
    ttft: list[dict] = field(default_factory=list)
    scale: list[dict] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)
    below_aims: list[str] = field(default_factory=list)


class Run:
    """One run of the benchmarks."""

    def __init__(self, full: bool, jobs: int, console: Console) -> None:
        from vllm_pr.bench.workers import Workers
        from vllm_pr.engine.variants import tree_release

        self.full = full
        self.console = console
        self.workers = Workers(jobs=jobs)
        self.results = Results(tree_release(None), full)

    def hits(
        self, names: list[str], trace: Path | None, requests: int, plots: Path
    ) -> None:
        """Hit rate against pool size."""
        from vllm_pr.bench import report, sweep
        from vllm_pr.bench.plots import write_plots
        from vllm_pr.bench.trace import trace_workload
        from vllm_pr.bench.workloads import WORKLOADS

        served = dict(WORKLOADS)
        if trace is not None:
            served["trace"] = trace_workload(trace, requests)
        workloads = [served[name] for name in names]
        keywords = _trace_keywords(trace, requests)
        total = len(sweep.jobs(workloads, self.full))
        with self.progress("hit rates", total) as advance:
            points = sweep.run_sweep(
                self.workers, workloads, self.full, on_point=advance, **keywords
            )
        self.results.hit_rates = [asdict(point) for point in points]
        self.results.below_aims += sweep.below_aims(points)
        self.results.summary += sweep.summed_up(points)
        for table in report.hit_tables(points):
            self.console.print(table)
        for path in write_plots(points, plots):
            self.console.print(f"plot: {path}", soft_wrap=True)

    def cost(self, trace: Path | None, requests: int) -> None:
        """What it costs."""
        from vllm_pr.bench import cost, report
        from vllm_pr.bench.trace import read_trace

        keywords = _trace_keywords(trace, min(requests, COST_REQUESTS))
        if trace is not None:
            read_trace(trace, requests)
        plans = cost.plans(self.full, keywords)
        queues = len(cost.QUEUE_BATCHES) * (len(cost.QUEUE_BLOCKS) if self.full else 1)
        with self.progress("cost", len(plans) + queues + 13) as advance:
            self.results.memory = cost.measure_memory(self.workers)
            advance()
            costs = []
            for plan in plans:
                costs.append(cost.measure_cost(self.workers, plan))
                advance()
            self.results.queue = cost.measure_queues(self.workers, self.full, advance)
            self.results.events = cost.measure_events(self.workers, advance)
        self.results.cost = [asdict(one) for one in costs]
        self.results.below_aims += cost.queues_above_aims(self.results.queue)
        for one in costs:
            self.results.below_aims += one.above_aims
        self.console.print(report.cost_table(costs))
        self.console.print(report.queue_table(self.results.queue))
        self.console.print(report.event_table(self.results.events))
        for variant, size in self.results.memory.items():
            self.console.print(
                f"resident bytes a block of a pool, {variant}: {size:.0f}"
            )

    def ttft(self) -> None:
        """Time to first token."""
        from vllm_pr.bench import report, ttft

        models = ("gemma3-tiny", "dsv4-tiny") if self.full else ("gemma3-tiny",)
        rows = []
        total = len(models) * len(ttft.VARIANTS) * len(ttft.USERS)
        with self.progress("time to first token", total) as advance:
            for model in models:
                for row in ttft.measure_ttft(model):
                    rows.append(row)
                    advance()
        self.results.ttft = [asdict(row) for row in rows]
        self.console.print(report.ttft_table(rows))

    def scale(self) -> None:
        """Scale."""
        from vllm_pr.bench import report, scale

        rows = []
        with self.progress("scale", len(scale.SIZES)) as advance:
            for row in scale.measure_scale(self.workers):
                rows.append(row)
                advance()
        self.results.scale = [asdict(row) for row in rows]
        self.console.print(report.scale_table(rows))

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Any]:
        """A progress bar, or lines where none can be drawn; yields what advances it."""
        console = Console(stderr=True)
        if not console.is_terminal:
            done = itertools.count(1)
            yield lambda: _print_tenths(console, what, next(done), total)
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)


def bench(
    full: Annotated[
        bool, typer.Option("--full", help="All pools, settings and models (two hours).")
    ] = False,
    json_file: JsonFile = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Serve a request trace too (Mooncake's format)."
        ),
    ] = None,
    trace_requests: Annotated[
        int, typer.Option(min=1, help="Requests of the trace to serve.")
    ] = TRACE_REQUESTS,
    only: Annotated[
        list[Part] | None, typer.Option(help="Run this part; may be repeated.")
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Hit rates of this workload, or of the trace; may be repeated.",
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where plots go (default: build/bench/plots).",
            callback=writable,
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Hit rates to measure at once.")
    ] = os.cpu_count() or 1,
) -> None:
    """Measure hit rate, cost, time to first token and scale, stock and changed.

    Prints tables and, at the end, each point below the aims. Hit rates are exact: the
    same on every machine. Times are CPU times of both variants in turn.

    Exit status: 0 measured, 2 bad usage or a measurement that failed.
    """
    from vllm_pr.bench.trace import TraceError
    from vllm_pr.bench.workers import BenchError
    from vllm_pr.bench.workloads import WORKLOADS
    from vllm_pr.engine.processes import EngineError
    from vllm_pr.patching.errors import PatchError

    parts = only or list(Part)
    known = [*WORKLOADS, *(["trace"] if trace else [])]
    names = workload or known
    if unknown := [name for name in names if name not in known]:
        _refuse(f"no workload {unknown[0]!r}: there is {', '.join(known)}")
    try:
        console = Console()
        if not console.is_terminal:
            console.width = PLAIN_WIDTH
        run = Run(full, jobs, console)
        with run.workers:
            if Part.HITS in parts:
                run.hits(names, trace, trace_requests, plots or _default_plots())
            if Part.COST in parts:
                run.cost(trace, trace_requests)
            if Part.SCALE in parts:
                run.scale()
        if Part.TTFT in parts:
            run.ttft()
    except (TraceError, BenchError, EngineError, PatchError) as error:
        _refuse(str(error))
    _sum_up(run.console, run.results)
    if json_file:
        json_file.write_text(json.dumps(asdict(run.results), indent=1) + "\n")


def _print_tenths(console: Console, what: str, done: int, total: int) -> None:
    if 10 * done // total > 10 * (done - 1) // total:
        console.print(f"{what}: {done} of {total}", highlight=False)


def _trace_keywords(trace: Path | None, requests: int) -> dict[str, Any]:
    return {"trace": str(trace.resolve()), "requests": requests} if trace else {}


def _default_plots() -> Path:
    from vllm_pr.bench.workers import BUILD

    return BUILD / "plots"


def _sum_up(console: Console, results: Results) -> None:
    for line in results.summary:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    below = results.below_aims
    if not below:
        console.print("every point meets the aims")
        return
    console.print(f"{len(below)} below the aims:")
    for line in below:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _refuse(message: str) -> None:
    console = Console(stderr=True)
    console.print(f"bench: {message}", markup=False, style="red", soft_wrap=True)
    raise typer.Exit(2)
