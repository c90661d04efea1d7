# SPDX-License-Identifier: Apache-2.0
"""Model geometries and scenarios, as plain data, and the worker that runs them.

A geometry is a model's KV cache groups. A scenario is a list of requests against one
pool. Both are read by the matrix, the benchmarks and the tests; nothing here imports
vLLM until a scenario runs, so any process may read them.

``python -m vllm_pr.scenarios --json`` runs scenarios on the vLLM that is first on
``PYTHONPATH`` and prints one JSON object a line.
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class Group:
    """One KV cache group.

    Attributes:
        kind: "full", "sliding", "mla", "sliding_mla", "chunked_local", "mamba" (state
            snapshots at block boundaries) or "cross" (never cached).
        block_size: tokens a block.
        window: tokens of the sliding window or of a chunk, None where there is none.
    """

    kind: str
    block_size: int
    window: int | None = None


@dataclass(frozen=True)
class Geometry:
    """The KV cache groups of a model, in the order in which vLLM allocates them."""

    name: str
    groups: tuple[Group, ...]
    max_model_len: int = 1 << 20


# Two groups of sliding-window layers, the compressed MLA layers (C4A, C128A and the
# indexer share one), the states of the C128 and of the C4 compressor.
DEEPSEEK_V4_FLASH = Geometry(
    "deepseek-v4-flash",
    (
        Group("sliding_mla", 64, 128),
        Group("sliding_mla", 64, 128),
        Group("mla", 256),
        Group("sliding_mla", 8, 128),
        Group("sliding_mla", 4, 8),
    ),
)
# One full-attention layer in six; issue 57610 reports this shape.
GEMMA = Geometry(
    "gemma",
    (Group("full", 32), *[Group("sliding", 16, 1024)] * 5),
    max_model_len=1 << 17,
)
GEOMETRIES = {geometry.name: geometry for geometry in (DEEPSEEK_V4_FLASH, GEMMA)}


@dataclass(frozen=True)
class Text:
    """``tokens`` token ids that belong to ``key`` alone, from ``start`` on."""

    key: str
    tokens: int
    start: int = 0


@dataclass(frozen=True)
class Ask:
    """One request: what is asked, and what the model answers.

    Attributes:
        name: unique within the scenario.
        prompt: pieces of the prompt.
        output: what is sampled.
    """

    name: str
    prompt: tuple[Text, ...]
    output: Text

    @property
    def prompt_tokens(self) -> int:
        return sum(piece.tokens for piece in self.prompt)


@dataclass(frozen=True)
class Scenario:
    """Requests against one pool, one after the other.

    Attributes:
        name: unique.
        about: one line for a reader.
        geometry: the model.
        blocks: size of the pool, in blocks.
        chunk_tokens: most prompt tokens in one scheduler step.
        asks: the requests.
        shown: the requests that tell a reader what happened, each with the heading of
            its column in a table.
        resend: name of the request that repeats its predecessor at once, or None.
        returns: name of the request that must be served as well as ``resend``, or None.
    """

    name: str
    about: str
    geometry: Geometry
    blocks: int
    chunk_tokens: int
    asks: tuple[Ask, ...]
    shown: tuple[tuple[str, str], ...]
    resend: str | None = None
    returns: str | None = None


@dataclass
class Row:
    """What one request of a scenario got.

    Attributes:
        interval: retention interval as it was asked for, ``"default"`` included.
        peak_blocks: most blocks that it held at once.
    """

    scenario: str
    interval: int | str | None
    eagle: bool
    request: str
    prompt_tokens: int
    cached_tokens: int
    peak_blocks: int


@lru_cache(maxsize=64)
def _ids(key: str, count: int) -> tuple[int, ...]:
    return tuple(random.Random(key).choices(range(100_000), k=count))


def token_ids(*pieces: Text) -> list[int]:
    """The token ids of a prompt: the same on every machine and in every release."""
    ids: list[int] = []
    for piece in pieces:
        ids += _ids(piece.key, piece.start + piece.tokens)[piece.start :]
    return ids


def _ask(name: str, *prompt: Text, output: int = 16) -> Ask:
    return Ask(name, prompt, Text(f"output of {name}", output))


def session_switch(
    name: str, geometry: Geometry, tokens: int, blocks: int, chunk_tokens: int = 8192
) -> Scenario:
    """Requests A, A, B, A: switch to another session and come back."""
    a, b = Text("session A", tokens), Text("session B", tokens)
    return Scenario(
        name,
        f"A, A, B, A, {tokens:,} tokens each: switch to another session and back",
        geometry,
        blocks,
        chunk_tokens,
        (_ask("A", a), _ask("A resend", a), _ask("B", b), _ask("A return", a)),
        shown=(
            ("A resend", f"{tokens // 1000}k resend"),
            ("A return", f"{tokens // 1000}k return"),
        ),
        resend="A resend",
        returns="A return",
    )


def branch(tokens: int = 50_000) -> Scenario:
    """Two branches off the middle of a prompt, the first seen by nobody before."""
    half = Text("session A", tokens // 2)

    def rest(key: str) -> Text:
        return Text(key, tokens - half.tokens)

    return Scenario(
        "branch",
        f"branches off the middle of a {tokens:,}-token prompt",
        DEEPSEEK_V4_FLASH,
        20_000,
        8192,
        (
            _ask("A", Text("session A", tokens)),
            _ask("first branch", half, rest("branch 1")),
            _ask("second branch", half, rest("branch 2")),
        ),
        shown=(
            ("first branch", "first branch"),
            ("second branch", "second branch"),
        ),
    )


def system_prompt(shared: int = 20_000, own: int = 3_000) -> Scenario:
    """Sessions with the same system prompt."""
    system = Text("system prompt", shared)
    names = ("first session", "second session", "third session")
    return Scenario(
        "system_prompt",
        f"sessions of {shared + own:,} tokens, the first {shared:,} are the same",
        DEEPSEEK_V4_FLASH,
        20_000,
        8192,
        tuple(_ask(name, system, Text(name, own)) for name in names),
        shown=tuple((name, name) for name in names[1:]),
    )


def _chat(name: str, opening: int, turns: int, user: int, output: int) -> list[Ask]:
    """The requests of one growing conversation."""
    history: tuple[Text, ...] = (Text(f"{name} opening", opening),)
    asks = []
    for turn in range(1, turns + 1):
        ask = _ask(f"{name} turn {turn}", *history, output=output)
        asks.append(ask)
        history = (*history, ask.output, Text(f"{name} user {turn}", user))
    return asks


def multi_turn() -> Scenario:
    """One conversation that grows."""
    asks = _chat("chat", opening=30_000, turns=5, user=2_000, output=500)
    return Scenario(
        "multi_turn",
        "one conversation of five turns, from 30,000 tokens up",
        DEEPSEEK_V4_FLASH,
        20_000,
        8192,
        tuple(asks),
        shown=((asks[-1].name, asks[-1].name),),
    )


def round_robin() -> Scenario:
    """Two users take turns on a pool that holds both chats and little more."""
    chats = [_chat(name, 50_000, 3, user=500, output=100) for name in "AB"]
    asks = [ask for turn in zip(*chats, strict=True) for ask in turn]
    return Scenario(
        "round_robin",
        "two chats of 50,000 tokens take turns, three each, on 2,701 blocks",
        DEEPSEEK_V4_FLASH,
        2_701,
        2048,
        tuple(asks),
        shown=((asks[2].name, "2 users turn 2"), (asks[-1].name, "2 users turn 3")),
    )


def edit_end(tokens: int = 5_000, edited: int = 10) -> Scenario:
    """The same prompt with its last tokens edited: issue 57610."""
    kept = Text("session A", tokens - edited)
    return Scenario(
        "edit_end",
        f"a {tokens:,}-token prompt again, its last {edited} tokens edited",
        GEMMA,
        20_000,
        8192,
        (
            _ask("A", Text("session A", tokens)),
            _ask("edited", kept, Text("edit", edited)),
        ),
        shown=(("edited", "edited end"),),
    )


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        session_switch("session_switch_50k", DEEPSEEK_V4_FLASH, 50_000, 20_000),
        session_switch("session_switch_250k", DEEPSEEK_V4_FLASH, 250_000, 20_000),
        branch(),
        system_prompt(),
        multi_turn(),
        round_robin(),
        edit_end(),
    )
}


def run(
    scenario: Scenario,
    eagle: bool = False,
    interval: int | str | None = "default",
    **driver: Any,
) -> Iterator[Row]:
    """Run a scenario on a fresh pool of the vLLM that this process imports.

    Args:
        scenario: what to run.
        eagle: whether an EAGLE drafter runs.
        interval: retention interval in tokens, None, or "default".
        **driver: further arguments of `vllm_pr.driver.Driver`.
    """
    from vllm_pr.driver import Driver

    driver.setdefault("chunk_tokens", scenario.chunk_tokens)
    driver.setdefault("blocks", scenario.blocks)
    cache = Driver(scenario.geometry, eagle=eagle, interval=interval, **driver)
    for ask in scenario.asks:
        served = cache.run(token_ids(*ask.prompt), token_ids(ask.output))
        yield Row(
            scenario.name,
            interval,
            eagle,
            ask.name,
            served.prompt_tokens,
            served.cached_tokens,
            served.peak_blocks,
        )


def interval_argument(text: str) -> int | None | str:
    """Parse an interval: ``default``, ``none`` or a number of tokens."""
    if text in ("default", "none"):
        return None if text == "none" else text
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """The worker: rows as JSON, one a line, as soon as they are known."""
    parser = argparse.ArgumentParser(prog="python -m vllm_pr.scenarios")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--scenario", action="append", choices=sorted(SCENARIOS))
    parser.add_argument(
        "--interval",
        action="append",
        type=interval_argument,
        help="default, none or tokens; more than once: all of them",
    )
    parser.add_argument("--eagle", choices=("off", "on", "both"), default="both")
    options = parser.parse_args(arguments)
    modes = {"off": [False], "on": [True], "both": [False, True]}[options.eagle]
    for name, eagle, interval in itertools.product(
        options.scenario or SCENARIOS, modes, options.interval or ["default"]
    ):
        for row in run(SCENARIOS[name], eagle, interval):
            print(json.dumps(asdict(row)) if options.json else _line(row), flush=True)


def _line(row: Row) -> str:
    share = 100 * row.cached_tokens / row.prompt_tokens
    return (
        f"{row.scenario:20} {str(row.interval).lower():8} "
        f"{'EAGLE' if row.eagle else '-':6} {row.request:16} {row.prompt_tokens:8,} "
        f"{row.cached_tokens:8,} {share:6.1f} %  {row.peak_blocks:6,} blocks"
    )


if __name__ == "__main__":
    sys.exit(main())
