# SPDX-License-Identifier: Apache-2.0
"""Every release, stock and changed: what each serves from its prefix cache.

``vllm-pr matrix`` runs all scenarios of `vllm_pr.scenarios` on the real
``KVCacheManager`` of every release, compares changed with stock and the facts in
``releases.toml`` with what was measured, and writes the tables of
``docs/releases.md``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated

import typer

from vllm_pr.outputs import Console, JsonFile, writable
from vllm_pr.patching.errors import PatchError
from vllm_pr.releases import ROOT, Release, find_release, known_releases, stock_tree
from vllm_pr.scenarios import SCENARIOS

DOCS = ROOT / "docs" / "releases.md"
STOCK_DEFAULT, STOCK_NONE, CHANGED = "stock-default", "stock-none", "changed"
RETURN_SHARE = 0.99
WORKERS = 2
_PIPE_WIDTH = 148
_FIRST_COLUMNS, _COLUMN = 27, 10  # characters of release and variant, of each other
_KEPT_VARIABLES = ("HOME", "LANG", "LC_ALL", "PATH", "TMPDIR")


@dataclass(frozen=True)
class Result:
    """What one request got, in one variant of one release."""

    release: str
    variant: str
    scenario: str
    eagle: bool
    request: str
    prompt_tokens: int
    cached_tokens: int

    @property
    def share(self) -> float:
        """Percentage of the prompt served from the cache."""
        return 100 * self.cached_tokens / self.prompt_tokens


@dataclass(frozen=True)
class Job:
    """One worker process.

    Attributes:
        release: what runs.
        tree: folder that goes first on ``PYTHONPATH``.
        variants: name and interval of each variant.
        scenarios: names of the scenarios.
    """

    release: Release
    tree: Path
    variants: tuple[tuple[str, str], ...]
    scenarios: tuple[str, ...] = tuple(SCENARIOS)

    @property
    def name(self) -> str:
        names = {variant.split("-")[0] for variant, _ in self.variants}
        return f"{self.release.version} {' '.join(sorted(names))}"

    @property
    def rows(self) -> int:
        requests = sum(len(SCENARIOS[name].asks) for name in self.scenarios)
        return requests * 2 * len(self.variants)


class Results:
    """All results, looked up by what they are of."""

    def __init__(self, results: Iterable[Result]) -> None:
        self.all = list(results)
        self._index = {
            (r.release, r.variant, r.scenario, r.eagle, r.request): r for r in self.all
        }

    def get(
        self, release: str, variant: str, scenario: str, eagle: bool, request: str
    ) -> Result | None:
        return self._index.get((release, variant, scenario, eagle, request))

    def stock(self, like: Result, request: str | None = None) -> list[Result]:
        """Both stock variants' results for the same request, or another one."""
        wanted = request or like.request
        found = (
            self.get(like.release, variant, like.scenario, like.eagle, wanted)
            for variant in (STOCK_DEFAULT, STOCK_NONE)
        )
        return [result for result in found if result is not None]

    def variants(self) -> list[tuple[str, str]]:
        """Release and variant of all results, in the order in which they are shown."""
        order = [STOCK_NONE, STOCK_DEFAULT, CHANGED]
        releases = [release.version for release in known_releases()]
        pairs = {(result.release, result.variant) for result in self.all}
        return sorted(pairs, key=lambda p: (releases.index(p[0]), order.index(p[1])))


def shortfalls(results: Results) -> list[str]:
    """Where changed is below stock, or below what the change is for; one line each."""
    return [
        f"{r.release}{' EAGLE' if r.eagle else ''}, {r.scenario}, {r.request}: "
        f"changed serves {r.cached_tokens:,} tokens, {why}"
        for r in results.all
        if r.variant == CHANGED
        for why in _reasons(results, r)
    ]


def _reasons(results: Results, changed: Result) -> Iterator[str]:
    for stock in results.stock(changed):
        if changed.cached_tokens < stock.cached_tokens:
            yield f"{stock.variant} {stock.cached_tokens:,}"
    scenario = SCENARIOS[changed.scenario]
    if changed.request == scenario.returns and scenario.resend:
        resends = results.stock(changed, scenario.resend)
        best = max((resend.cached_tokens for resend in resends), default=0)
        if changed.cached_tokens < RETURN_SHARE * best:
            yield f"the immediate resend on stock {best:,}"


def contradictions(results: Results) -> list[str]:
    """Where a verdict in ``releases.toml`` is not what was measured; one line each."""
    lines = []
    for release in known_releases():
        for fact, found in _verdicts(results, release.version):
            if found != (written := getattr(release, fact)):
                lines.append(
                    f"releases.toml says {fact} = {written!r} of {release.version}, "
                    f"measured is {found!r}"
                )
    return lines


def _verdicts(results: Results, release: str) -> Iterator[tuple[str, str]]:
    """What was measured of each fact, of a release as it ships."""

    def lost(scenario: str, request: str, eagle: bool = False) -> bool | None:
        found = results.get(release, STOCK_DEFAULT, scenario, eagle, request)
        return None if found is None else found.cached_tokens == 0

    short = lost("session_switch_50k", "A return")
    long = lost("session_switch_250k", "A return")
    if short is not None and long is not None:
        kept = "lost-when-long" if long else "kept"
        yield "session_switch", "lost" if short else kept
    for fact, is_lost in (
        ("first_branch", lost("branch", "first branch")),
        ("eagle_resend", lost("session_switch_50k", "A resend", eagle=True)),
    ):
        if is_lost is not None:
            yield fact, "lost" if is_lost else "kept"


def plan(release: Release, scenarios: tuple[str, ...] = tuple(SCENARIOS)) -> list[Job]:
    """The worker processes for a release.

    Raises:
        PatchError: Its wheel cannot be had, or a rule does not fit.
    """
    variants = [(STOCK_DEFAULT, "default")]
    if release.interval == "0":
        variants.append((STOCK_NONE, "none"))
    jobs = [Job(release, stock_tree(release.version), tuple(variants), scenarios)]
    if release.change:
        from vllm_pr.patching.trees import changed_tree

        tree = changed_tree(release.version)
        jobs.append(Job(release, tree, ((CHANGED, "default"),), scenarios))
    return jobs


class Run:
    """Worker processes, two at a time; a failed one stops none of the others.

    Args:
        jobs: What to run.
        seen: Called for each row.
        done: Called for each finished worker.
    """

    def __init__(
        self,
        jobs: list[Job],
        seen: Callable[[Job], None] = lambda job: None,
        done: Callable[[Job], None] = lambda job: None,
    ) -> None:
        self.jobs = jobs
        self.failed: list[str] = []
        self._seen, self._done = seen, done
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen] = set()
        self._stopped = False

    def results(self) -> list[Result]:
        """Run all; rows in the order of the jobs."""
        with ThreadPoolExecutor(WORKERS) as pool:
            try:
                return [r for rows in pool.map(self._work, self.jobs) for r in rows]
            except BaseException:
                self._stop()
                raise

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._processes:
                process.kill()

    def _work(self, job: Job) -> list[Result]:
        results = []
        with tempfile.TemporaryFile("w+") as errors:
            process = self._start(job, errors)
            if process is None:
                return []
            for line in process.stdout:
                results.append(_result(job, json.loads(line)))
                self._seen(job)
            code = process.wait()
            with self._lock:
                self._processes.discard(process)
            if code:
                errors.seek(0)
                last = (errors.read().strip().splitlines() or ["no message"])[-1]
                self.failed.append(f"{job.name}: the worker failed ({code}): {last}")
        self._done(job)
        return results

    def _start(self, job: Job, errors: IO[str]) -> subprocess.Popen | None:
        command = [sys.executable, "-m", "vllm_pr.scenarios", "--json"]
        for _, interval in job.variants:
            command += ["--interval", interval]
        for name in job.scenarios:
            command += ["--scenario", name]
        with self._lock:
            if self._stopped:
                return None
            process = subprocess.Popen(
                command,
                env=_environment(job.tree),
                cwd=tempfile.gettempdir(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            self._processes.add(process)
            return process


def _environment(tree: Path) -> dict[str, str]:
    """What a worker gets: nothing that vLLM would read beside what is set here."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return kept | {
        "PYTHONPATH": str(tree),
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def _result(job: Job, row: dict) -> Result:
    interval = "none" if row["interval"] is None else str(row["interval"])
    variant = next(name for name, asked in job.variants if asked == interval)
    fields = ("scenario", "eagle", "request", "prompt_tokens", "cached_tokens")
    return Result(job.release.version, variant, *(row[field] for field in fields))


def _columns(results: Results) -> list[tuple[str, str, str]]:
    """Scenario, request and heading of each column of the tables."""
    measured = {result.scenario for result in results.all}
    return [
        (scenario.name, request, heading)
        for scenario in SCENARIOS.values()
        if scenario.name in measured
        for request, heading in scenario.shown
    ]


def table_rows(results: Results, eagle: bool) -> list[list[str]]:
    """Release, variant and percentages, one list a release and variant."""
    rows = []
    for release, variant in results.variants():
        cells = [
            results.get(release, variant, scenario, eagle, request)
            for scenario, request, _ in _columns(results)
        ]
        shares = ["–" if cell is None else f"{cell.share:.1f}" for cell in cells]
        rows.append([release, variant, *shares])
    return rows


def print_tables(results: Results, console: Console) -> None:
    """Both tables, each in as many parts as the terminal's width asks for."""
    headings = [heading for _, _, heading in _columns(results)]
    at_once = max(1, (console.width - _FIRST_COLUMNS) // _COLUMN)
    for eagle in (False, True):
        rows = table_rows(results, eagle)
        title = "Prompt tokens served from the prefix cache, %"
        for start in range(0, len(headings), at_once):
            part = slice(start, start + at_once)
            _print_table(
                console,
                title + (", with EAGLE" if eagle else ", without EAGLE"),
                headings[part],
                [[*row[:2], *row[2:][part]] for row in rows],
            )


def _print_table(
    console: Console, title: str, headings: list[str], rows: list[list[str]]
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", padding=(0, 1))
    table.add_column("release", no_wrap=True)
    table.add_column("variant", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", width=_COLUMN - 3)
    previous = ""
    for release, variant, *shares in rows:
        if previous and release != previous:
            table.add_section()
        style = "bold" if variant == CHANGED else None
        name = release if release != previous else ""
        table.add_row(name, variant, *map(_coloured, shares), style=style)
        previous = release
    console.print(table)


def _coloured(share: str) -> str:
    return f"[red]{share}[/red]" if share == "0.0" else share


def markdown(results: Results, missing: dict[str, str]) -> str:
    """Both tables in Markdown, and what each column is."""
    parts = []
    for eagle in (False, True):
        heading = ["release", "variant", *(name for _, _, name in _columns(results))]
        rows = table_rows(results, eagle)
        for row in rows:
            if row[1] == CHANGED:
                row[1:] = [f"**{cell}**" for cell in row[1:]]
        absent = [[version, "no wheel"] for version in missing]
        parts += [
            f"### {'With' if eagle else 'Without'} EAGLE",
            _markdown_table(heading, [*rows, *absent]),
        ]
    parts.append("Each scenario, on an empty pool, one request after the other:")
    parts.append(
        "\n".join(
            f"* `{scenario.name}`: {scenario.about}; {scenario.geometry.name} groups, "
            f"{scenario.blocks:,} blocks, chunks of {scenario.chunk_tokens:,} tokens."
            for scenario in SCENARIOS.values()
        )
    )
    return "\n\n".join(parts)


def facts_markdown() -> str:
    """What ``releases.toml`` knows, as a Markdown table."""
    heading = [
        *("release", "wheel", "default interval", "set by", "freed blocks"),
        *("junctions", "CPU engine", "change"),
    ]
    rows = [
        [
            release.version,
            f"`{release.distribution}`",
            release.interval,
            release.interval_set_by,
            release.free_blocks,
            "yes" if release.junctions else "no",
            "runs" if release.engine else "–",
            "yes" if release.change else "refused",
        ]
        for release in known_releases()
    ]
    return _markdown_table(heading, rows)


def _markdown_table(heading: list[str], rows: list[list[str]]) -> str:
    width = len(heading)
    filled = [row + [""] * (width - len(row)) for row in rows]
    lines = [heading, ["---"] * width, *filled]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fill_markers(text: str, name: str, content: str) -> str:
    """The text with ``content`` between the two marker lines of a name.

    Raises:
        PatchError: The markers are not there, once each and in order.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    pattern = re.compile(f"({re.escape(begin)}\n).*?({re.escape(end)})", re.DOTALL)
    filled, count = pattern.subn(lambda m: f"{m[1]}\n{content}\n\n{m[2]}", text)
    if count != 1:
        raise PatchError(f"needs the line {begin!r} and then {end!r}, once each")
    return filled


def write_docs(path: Path, results: Results, missing: dict[str, str]) -> None:
    """Regenerate the tables of the page; the prose around them stays.

    Raises:
        PatchError: The page cannot be read, or has no markers for the tables.
    """
    text = _read_page(path)
    text = fill_markers(text, "matrix", markdown(results, missing))
    _write(path, fill_markers(text, "facts", facts_markdown()))


def _read_page(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        for name in ("matrix", "facts"):
            fill_markers(text, name, "")
    except (OSError, UnicodeDecodeError, PatchError) as error:
        raise PatchError(f"--docs {path}: {error}") from None
    return text


def _write(path: Path, text: str) -> None:
    """Write a file in one piece."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def matrix(
    release: Annotated[
        list[str] | None,
        typer.Option(help="A release; more than once for several. Default: all."),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(help="A scenario; more than once for several. Default: all."),
    ] = None,
    json_file: JsonFile = None,
    docs: Annotated[
        Path | None,
        typer.Option(
            help="Page whose tables are regenerated. Default: docs/releases.md when "
            "all releases and scenarios run.",
            callback=writable,
        ),
    ] = None,
) -> None:
    """Measure every release, stock and changed, on its own KVCacheManager.

    Exit status 1 when a changed row is below stock or below the aims, or when a fact
    about a release is not what was measured; 2 for bad input.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        releases = [find_release(version) for version in release or []]
        scenarios = _scenarios(scenario)
        if (release or scenario) and docs is not None:
            raise PatchError("--docs needs all: leave --release and --scenario out")
        docs = docs or (None if release or scenario else DOCS)
        if docs is not None:
            _read_page(docs)
        jobs, missing = _prepare(releases or list(known_releases()), scenarios, console)
    except PatchError as error:
        _say(console, error.lines)
        raise typer.Exit(2) from None
    results, failed = _measure(jobs, console)
    _report(results, missing, json_file, docs if not failed else None)
    wrong = [*failed, *shortfalls(results), *contradictions(results)]
    _say(console, [*missing.values(), *wrong])
    raise typer.Exit(1 if wrong else 0)


def _scenarios(names: list[str] | None) -> tuple[str, ...]:
    for name in names or []:
        if name not in SCENARIOS:
            known = ", ".join(SCENARIOS)
            raise PatchError(f"no such scenario: {name} (known: {known})")
    return tuple(names or SCENARIOS)


def _say(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(f"vllm-pr: {line}", markup=False)


def _prepare(
    releases: list[Release], scenarios: tuple[str, ...], console: Console
) -> tuple[list[Job], dict[str, str]]:
    """The jobs, and why a release has none.

    Raises:
        PatchError: No release has a wheel, or the rules do not fit one.
    """
    jobs: list[Job] = []
    missing = {}
    for release in releases:
        with console.status(f"preparing {release.version}"):
            try:
                stock_tree(release.version)
            except PatchError as error:
                missing[release.version] = str(error)
                continue
            jobs += plan(release, scenarios)
    if not jobs:
        raise PatchError(*missing.values())
    return jobs, missing


def _measure(jobs: list[Job], console: Console) -> tuple[Results, list[str]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} requests"),
        TimeElapsedColumn(),
    )
    live = console.is_terminal
    with Progress(
        *columns, console=console, transient=True, disable=not live
    ) as progress:
        task = progress.add_task("matrix", total=sum(job.rows for job in jobs))

        def seen(job: Job) -> None:
            progress.update(task, advance=1, description=job.name)

        def done(job: Job) -> None:
            if not live:
                _say(console, [f"{job.name}: done"])

        run = Run(jobs, seen, done)
        return Results(run.results()), run.failed


def _report(
    results: Results,
    missing: dict[str, str],
    json_file: Path | None,
    docs: Path | None,
) -> None:
    plain = Console()
    print_tables(results, plain if plain.is_terminal else Console(width=_PIPE_WIDTH))
    if json_file is not None:
        rows = [asdict(result) for result in results.all]
        json_file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if docs is not None:
        write_docs(docs, results, missing)
