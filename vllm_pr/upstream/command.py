# SPDX-License-Identifier: Apache-2.0
"""``vllm-pr upstream``."""

import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, NoReturn

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from vllm_pr.outputs import Console, JsonFile
from vllm_pr.upstream.compare import Comparison, Rerun, compare
from vllm_pr.upstream.runs import Outcome, Runner
from vllm_pr.upstream.sources import SIDES, Side, both_sides, select

RERUNS = 3
Outcomes = dict[str, dict[str, Outcome]]


def upstream(
    release: Annotated[
        str | None, typer.Option(help="A release (default: the installed vLLM).")
    ] = None,
    part: Annotated[
        str, typer.Option(help="queue for commit 1 alone; all, or default, for both.")
    ] = "all",
    only: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Test files whose path has this in it."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Files at a time (default: one a core).")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Run upstream's own tests on stock and on changed, and compare.

    Exit code 1 if a test that passes on stock fails on changed.
    """
    from vllm_pr.patching.errors import PatchError

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        try:
            with console.status("laying out upstream's tests and both sides"):
                sides = stack.enter_context(both_sides(release, part))
                files = select(sides[0].root, only)
            if not files:
                raise ValueError(f"no test file matches {only!r}")
        except (PatchError, ValueError, OSError) as error:
            _quit(console, error, 2)
        try:
            outcomes = run_all(sides, files, console, jobs or _cores())
            comparison = compare(*outcomes.values())
            settle(comparison, sides, outcomes, console)
        except RuntimeError as error:
            _quit(console, error, 1)
    if json_file:
        text = json.dumps({"release": sides[0].release, **asdict(comparison)})
        json_file.write_text(text + "\n", encoding="utf-8")
    show(comparison, Console(highlight=False))
    raise typer.Exit(1 if comparison.lost else 0)


def _quit(console: Console, error: Exception, code: int) -> NoReturn:
    console.print(f"vllm-pr: {error}", markup=False)
    raise typer.Exit(code) from None


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def run_all(
    sides: tuple[Side, ...], files: list[str], console: Console, jobs: int = 1
) -> Outcomes:
    """Run every file on both sides, one after the other; ``jobs`` files at a time."""
    outcomes: Outcomes = {side.name: {} for side in sides}
    teams: SimpleQueue[list[Runner]] = SimpleQueue()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(*columns, console=console))
        task = progress.add_task("", total=len(files) * len(sides))

        def work(file: str) -> None:
            team = teams.get()
            try:
                for side, runner in zip(sides, team, strict=True):
                    about = f"{side.name:7} {Path(file).name}"
                    progress.update(task, description=about)
                    outcomes[side.name].update(runner.run(file))
                    progress.advance(task)
            finally:
                teams.put(team)

        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        for number in range(jobs):
            runners = (closing(Runner(side, number)) for side in sides)
            teams.put([stack.enter_context(runner) for runner in runners])
        # Large files first, so that none is left for one worker alone at the end.
        files = sorted(files, key=lambda file: -(sides[0].root / file).stat().st_size)
        list(pool.map(work, files))
    return outcomes


def settle(
    comparison: Comparison,
    sides: tuple[Side, ...],
    outcomes: Outcomes,
    console: Console,
) -> None:
    """Run the files of lost tests again, and move what is flaky to ``flaky``."""
    if not comparison.lost:
        return
    files = sorted({test.split("::")[0] for test in comparison.lost})
    runs = [outcomes] + [run_all(sides, files, console) for _ in range(RERUNS)]
    for test in list(comparison.lost):
        history = Rerun(*(_statuses(runs, side.name, test) for side in sides))
        if history.flaky:
            comparison.lost.remove(test)
            comparison.flaky[test] = history


def _statuses(runs: list[Outcomes], side: str, test: str) -> tuple[str, ...]:
    return tuple(
        run[side][test].status if test in run[side] else "missing" for run in runs
    )


def show(comparison: Comparison, console: Console) -> None:
    """Print the tables."""
    lists = {
        "both pass": comparison.passed_both,
        "both fail": comparison.failed_both,
        "both skip": comparison.skipped_both,
        "flaky": list(comparison.flaky),
        "only changed passes": comparison.won,
        "only stock passes": comparison.lost,
    }
    table = Table()
    table.add_column("tests", no_wrap=True)
    for name in lists:
        table.add_column(name, justify="right")
    counts = [Counter(map(_folder, tests)) for tests in lists.values()]
    for folder in sorted(set().union(*counts)):
        table.add_row(folder, *(f"{count[folder]:,}" for count in counts))
    table.add_section()
    table.add_row("all", *(f"{len(tests):,}" for tests in lists.values()))
    console.print(table)
    if comparison.classes:
        reasons = Table("failed on both: why", "tests")
        for name, count in comparison.class_counts():
            reasons.add_row(name, f"{count:,}")
        console.print(reasons)
    for test, rerun in comparison.flaky.items():
        told = ", ".join(f"{s}: {' '.join(getattr(rerun, s))}" for s in SIDES)
        console.print(f"flaky: {test} ({told})", markup=False)
    for name in ("won", "lost"):
        for test in getattr(comparison, name):
            console.print(f"{name}: {test}", markup=False)


def _folder(test: str) -> str:
    """The folder of a test, at most four levels deep."""
    return "/".join(test.split("::")[0].split("/")[:-1][:4])
