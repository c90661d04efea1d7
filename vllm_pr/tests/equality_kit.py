# SPDX-License-Identifier: Apache-2.0
"""A random session workload with a fixed seed, and how two runs of it are compared."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_pr.engine.runner import Result

FIRST_TOKEN = 8  # those before are special
MOVES = ("go on", "resend", "edit", "branch")


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        what: The move that led to it: "start", "go on", "resend", "edit", "branch", or
            "quick": a short question outside of all sessions.
        prompt: Token ids.
        output_tokens: How many tokens to sample.
    """

    what: str
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True)
class Shape:
    """Sizes of a workload, in tokens unless said otherwise.

    Attributes:
        rounds: How many times requests are sent together, and all answers awaited.
        together: Requests of a crowd, which is every fourth round.
        quick: Quick questions among them; what they are answered is what fills a pool.
        sessions: Most sessions alive.
        shared: Length of the system prompt of all sessions.
        step: Longest addition to a conversation.
        longest: Longest prompt.
        output: Tokens sampled for most requests.
        long_output: Tokens sampled for the requests of a crowd.
        vocabulary: Size of the vocabulary.
    """

    rounds: int
    together: int
    quick: int
    sessions: int
    shared: int
    step: int
    longest: int
    output: int
    long_output: int
    vocabulary: int = 512


def workload(shape: Shape, seed: int) -> list[list[Ask]]:
    """Rounds of requests: sessions start, go on, switch, branch, change or return."""
    return list(_Sessions(shape, random.Random(seed)).rounds())


class _Sessions:
    """Conversations that grow; each is the token ids of its last prompt."""

    def __init__(self, shape: Shape, dice: random.Random) -> None:
        self._shape = shape
        self._dice = dice
        self._system = self._text(shape.shared)
        self._sessions: list[tuple[int, ...]] = []

    def rounds(self) -> Iterator[list[Ask]]:
        for number in range(self._shape.rounds):
            if number % 4 == 3:
                yield self._crowd()
            else:
                count = self._dice.choice((1, 1, 2))
                yield [self._ask(self._shape.output) for _ in range(count)]

    def _crowd(self) -> list[Ask]:
        shape = self._shape
        asks = [
            Ask("quick", self._text(self._dice.randrange(4, 32)), shape.long_output)
            for _ in range(shape.quick)
        ]
        while len(asks) < shape.together:
            asks.append(self._ask(shape.long_output))
        self._dice.shuffle(asks)
        return asks

    def _ask(self, output: int) -> Ask:
        fresh = len(self._sessions) < 2 or self._dice.random() < 0.15
        what = "start" if fresh else self._dice.choice(MOVES)
        if what == "start":
            prompt = self._system + self._text(
                self._dice.randrange(1, self._shape.step)
            )
            self._sessions = [*self._sessions[1 - self._shape.sessions :], prompt]
        else:
            which = self._dice.randrange(len(self._sessions))
            prompt = self._move(what, self._sessions[which])[: self._shape.longest]
            if what == "branch":
                kept = self._sessions[1 - self._shape.sessions :]
                self._sessions = [*kept, prompt]
            else:
                self._sessions[which] = prompt
        return Ask(what, prompt, output)

    def _move(self, what: str, old: tuple[int, ...]) -> tuple[int, ...]:
        if what == "go on":
            return old + self._text(self._dice.randrange(20, self._shape.step))
        if what == "edit":
            last = self._dice.randrange(1, 20)
            return old[:-last] + self._text(last)
        if what == "branch":
            cut = self._dice.randrange(len(old) // 2, len(old))
            return old[:cut] + self._text(
                self._dice.randrange(1, self._shape.step // 2)
            )
        return old

    def _text(self, count: int) -> tuple[int, ...]:
        ids = range(FIRST_TOKEN, self._shape.vocabulary)
        return tuple(self._dice.choices(ids, k=count))


def contradiction(one: Result, other: Result) -> str | None:
    """How two greedy answers disagree, if they do.

    What upstream demands of models that should be alike: where the tokens first
    differ, either side's token is among the most likely ones of the other side.
    Nothing is said about what follows.
    """
    if len(one.tokens) != len(other.tokens):
        return f"{len(one.tokens)} tokens against {len(other.tokens)}"
    at = first_difference(one, other)
    if at is None:
        return None
    for token, likely in (
        (one.tokens[at], other.logprobs[at]),
        (other.tokens[at], one.logprobs[at]),
    ):
        if token not in likely:
            return f"position {at}: token {token} is not among {sorted(likely)}"
    return None


def first_difference(one: Result, other: Result) -> int | None:
    """The position of the first sampled token that differs."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def distance(one: Result, other: Result) -> float:
    """Largest difference of a log probability while the answers are the same text.

    Infinite where the most likely tokens of a position have none in common.
    """
    at = first_difference(one, other)
    last = len(one.tokens) if at is None else at + 1
    pairs = zip(one.logprobs[:last], other.logprobs[:last], strict=True)
    return max(_distance(a, b) for a, b in pairs)


def _distance(one: dict[int, float], other: dict[int, float]) -> float:
    common = one.keys() & other.keys()
    return max((abs(one[token] - other[token]) for token in common), default=math.inf)


def contradictions(one: Sequence[Result], other: Sequence[Result]) -> list[str]:
    """All disagreements of two runs, one line each."""
    pairs = enumerate(zip(one, other, strict=True))
    found = ((i, contradiction(a, b)) for i, (a, b) in pairs)
    return [f"request {i}: {what}" for i, what in found if what]
