# SPDX-License-Identifier: Apache-2.0
"""``vllm-pr demo``: the fault and the cure on a real engine.

Three scenarios, each from an empty prefix cache, on stock with dense checkpoints, on
stock as it ships, and on changed as it ships. Every request is a chat, through the
model's chat template, and its figures are the engine's own.
"""

import json
import random
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from vllm_pr.engine.models import tiny_model
from vllm_pr.engine.processes import EngineError
from vllm_pr.engine.runner import Engine, start_engine
from vllm_pr.engine.tokenizer import PRELUDE_TOKENS
from vllm_pr.outputs import Console, JsonFile
from vllm_pr.patching.errors import PatchError

STOCK = ("stock-none", "stock-default")
CHANGED = "changed"
VARIANTS = (*STOCK, CHANGED)
TITLES = {
    "session_switch": "session switch",
    "branch": "branch",
    "second_session": "second session",
}
CAPTION = (
    "cached tokens, their share of the prompt, time to first token; branch: off the "
    "middle of A; second session: the same long system prompt"
)
START_COST = 2_000  # an engine start on the progress bar, in tokens of prefill
QUESTION = 200  # characters of a question after a long system prompt
MARKERS = len(("<|user|>", "<|end|>"))
OPENING = len(("<|assistant|>",))
TOO_SMALL = "To serve at least one request"  # vLLM says so of the pool
Chat = list[dict[str, str]]


@dataclass(frozen=True)
class Size:
    """How large a demo is.

    Attributes:
        prompt_tokens: Length of a prompt. Just above a multiple of the hit alignment,
            so that a full hit shows as one.
        blocks: Blocks of the pool: two finished prompts fit, while the checkpoints of
            two prompts do not.
    """

    prompt_tokens: int
    blocks: int


SIZES = {"dsv4-tiny": Size(2_060, 320), "gemma3-tiny": Size(3_003, 268)}


@dataclass(frozen=True)
class Row:
    """What one request of one variant got; tokens and seconds."""

    scenario: str
    variant: str
    request: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float

    @property
    def key(self) -> tuple[str, str]:
        return self.scenario, self.request

    @property
    def hit(self) -> float:
        """Share of the prompt that was served from the cache, in percent."""
        return 100 * self.cached_tokens / self.prompt_tokens


def scenarios(prompt_tokens: int) -> dict[str, list[tuple[str, Chat]]]:
    """The chats of each scenario, by name; one character is one token."""
    room = prompt_tokens - PRELUDE_TOKENS - OPENING - MARKERS
    a, b = _says("user", "session A", room), _says("user", "session B", room)
    half = prompt_tokens // 2 - PRELUDE_TOKENS - QUESTION - 2 * MARKERS
    start = [_says("user", "first half", half), _says("assistant", "answer", QUESTION)]
    rest = room - half - QUESTION - 2 * MARKERS
    system = [_says("system", "system prompt", room - QUESTION - MARKERS)]
    return {
        "session_switch": [
            ("A", [a]),
            ("A again", [a]),
            ("B", [b]),
            ("A returns", [a]),
        ],
        "branch": [
            ("A", [*start, _says("user", "second half", rest)]),
            ("first branch", [*start, _says("user", "another question", rest)]),
        ],
        "second_session": [
            ("first session", [*system, _says("user", "question 1", QUESTION)]),
            ("second session", [*system, _says("user", "question 2", QUESTION)]),
        ],
    }


def _says(role: str, seed: str, length: int) -> dict[str, str]:
    dice = random.Random(seed)
    return {
        "role": role,
        "content": "".join(dice.choices(string.ascii_letters + " ", k=length)),
    }


def measure(
    engine: Engine,
    variant: str,
    prompt_tokens: int,
    about: Callable[[str], None],
) -> Iterator[Row]:
    """Run all scenarios on a running engine; ``about`` is told each request first."""
    for scenario, requests in scenarios(prompt_tokens).items():
        engine.reset_prefix_cache()
        for request, chat in requests:
            about(f"{variant}: {TITLES[scenario]}, {request}")
            result = engine.ask(engine.render(chat))
            yield Row(
                scenario,
                variant,
                request,
                result.prompt_tokens,
                result.cached_tokens,
                round(result.ttft_s, 3),
            )


def below_stock(rows: Sequence[Row]) -> list[Row]:
    """Rows of changed that the better of the two stock settings beats."""
    best: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.variant in STOCK:
            best[row.key] = max(best.get(row.key, 0), row.cached_tokens)
    changed = (row for row in rows if row.variant == CHANGED)
    return [row for row in changed if row.cached_tokens < best[row.key]]


def verdict(rows: Sequence[Row]) -> str:
    """What the figures say, in plain words."""
    hits = {(row.scenario, row.request, row.variant): row.hit for row in rows}
    last = {row.scenario: row.request for row in rows}
    parts = [
        f"{request} {hits[scenario, request, CHANGED]:.0f} % (stock: "
        + " and ".join(f"{hits[scenario, request, v]:.0f} %" for v in STOCK)
        + ")"
        for scenario, request in last.items()
    ]
    worse = below_stock(rows)
    if worse:
        names = ", ".join(f"{row.request} of {row.scenario}" for row in worse)
        return (
            f"Changed is below a stock setting in: {names}. It serves from the cache: "
            f"{'; '.join(parts)}."
        )
    missing = [
        variant
        for variant in STOCK
        if any(hits[s, r, variant] < hits[s, r, CHANGED] for s, r in last.items())
    ]
    neither = " Neither stock setting has all three." if missing == [*STOCK] else ""
    return (
        "Changed is at least as good as the better stock setting in every row. It "
        f"serves from the cache: {'; '.join(parts)}.{neither}"
    )


def report(rows: Sequence[Row], model: str, release: str, blocks: int) -> Table:
    """The table: one line a request, the variants side by side."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"{model}, vLLM {release}, {blocks:,} blocks",
        caption=CAPTION,
    )
    table.add_column("request", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    for variant in VARIANTS:
        table.add_column(variant, justify="right", no_wrap=True)
    found = {(*row.key, row.variant): row for row in rows}
    worse = {row.key for row in below_stock(rows)}
    for scenario, title in TITLES.items():
        table.add_section()
        table.add_row(f"[bold]{title}[/bold]")
        for key in dict.fromkeys(row.key for row in rows if row.scenario == scenario):
            cells = [found[*key, variant] for variant in VARIANTS]
            best = max(cell.cached_tokens for cell in cells)
            shown = (_cell(cell, best, key in worse) for cell in cells)
            table.add_row(f" {key[1]}", f"{cells[0].prompt_tokens:,}", *shown)
    return table


def _cell(row: Row, best: int, worse: bool) -> str:
    text = f"{row.cached_tokens:>5,} {row.hit:>3.0f}% {row.ttft_s:>4.1f}s"
    if best == 0:
        return text
    bad = worse if row.variant == CHANGED else row.cached_tokens < best
    return f"[{'red' if bad else 'green'}]{text}[/]"


class _Bar:
    """Progress over all engines, in prompt tokens; lines where no bar can be drawn."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total)
        self._done = 0
        self._about = ""

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def about(self, text: str) -> None:
        self._about = text
        self._progress.update(self._task, description=text)
        if not self._console.is_terminal:
            self._console.print(text, highlight=False)

    def engine(self, what: str, done: int, total: int) -> None:
        """Called by the engine while it starts and prefills."""
        detail = f"{done:,} of {total:,} tokens" if total else what
        self._progress.update(
            self._task,
            completed=self._done + done,
            description=f"{self._about}: {detail}",
        )

    def finished(self, tokens: int) -> None:
        self._done += tokens
        self._progress.update(self._task, completed=self._done)


def run(
    model: str,
    trees: dict[str, Path | None],
    size: Size,
    console: Console,
) -> tuple[list[Row], str]:
    """Run the demo; the rows and the release that ran.

    Raises:
        EngineError: An engine did not start or died.
    """
    rows: list[Row] = []
    release = ""
    per_engine = sum(len(requests) for requests in scenarios(4_000).values())
    total = len(VARIANTS) * (START_COST + per_engine * size.prompt_tokens)
    with _Bar(console, total) as bar:
        for variant in VARIANTS:
            bar.about(f"{variant}: starting the engine")
            with start_engine(
                model,
                variant,
                trees[variant],
                blocks=size.blocks,
                engine_args={"max_model_len": size.prompt_tokens + 16},
                on_progress=bar.engine,
            ) as engine:
                release = engine.info.release
                bar.finished(START_COST)
                for row in measure(engine, variant, size.prompt_tokens, bar.about):
                    rows.append(row)
                    bar.finished(row.prompt_tokens)
    return rows, release


def demo(
    model: Annotated[
        str, typer.Option(help=f"Tiny model: {' or '.join(SIZES)}.")
    ] = "dsv4-tiny",
    json_file: JsonFile = None,
    release: Annotated[
        str | None,
        typer.Option(help="Another vLLM release, fetched once; default: installed."),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks of the pool; default: by model.")
    ] = None,
) -> None:
    """Switch sessions, branch and share a system prompt: stock against changed.

    Three engines of a tiny model run one after the other: stock with dense
    checkpoints, stock as it ships, changed as it ships; about 4 minutes. Exit status
    1 when changed is below the better of the two stock settings anywhere, 2 when the
    demo cannot run.
    """
    console, progress = Console(), Console(stderr=True)
    try:
        tiny_model(model)
        size = SIZES[model] if blocks is None else replace(SIZES[model], blocks=blocks)
        rows, ran = run(model, _trees(model, release), size, progress)
    except (ValueError, OSError, EngineError, PatchError) as error:
        reason = _too_small(size) if TOO_SMALL in str(error) else str(error)
        progress.print(f"vllm-pr demo: {escape(reason)}", soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        progress.print("vllm-pr demo: interrupted; the engine is stopped")
        raise typer.Exit(130) from None
    console.print(report(rows, model, ran, size.blocks))
    console.print(verdict(rows), highlight=False)
    if json_file:
        text = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
        json_file.write_text(text, encoding="utf-8")
    if below_stock(rows):
        raise typer.Exit(1)


def _trees(model: str, release: str | None) -> dict[str, Path | None]:
    """The folder with the vLLM of each variant."""
    from vllm_pr.patching.trees import changed_tree
    from vllm_pr.releases import find_release, stock_tree

    if release is None:
        return dict.fromkeys(STOCK) | {CHANGED: changed_tree()}
    found = find_release(release)
    first = tiny_model(model).first_release
    if not found.engine:
        raise ValueError(f"there is no CPU engine of vLLM {found.version} to run here")
    if _version(found.version) < _version(first):
        raise ValueError(f"{model} needs vLLM {first} or later, not {found.version}")
    stock = stock_tree(found.version)
    return dict.fromkeys(STOCK, stock) | {CHANGED: changed_tree(found.version)}


def _too_small(size: Size) -> str:
    return (
        f"a pool of {size.blocks:,} blocks does not hold one request of "
        f"{size.prompt_tokens:,} tokens: give --blocks a larger number"
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))
