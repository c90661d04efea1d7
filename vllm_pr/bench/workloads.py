# SPDX-License-Identifier: Apache-2.0
"""Workloads of the hit-rate sweep: seeded lists of requests, as plain data.

Each is what one serving pattern looks like to the prefix cache. Prompts are made of
texts (`vllm_pr.scenarios.Text`): equal texts are equal tokens.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vllm_pr.scenarios import Ask, Text

SEED = 20_300


@dataclass(frozen=True)
class Workload:
    """A serving pattern.

    Attributes:
        name: unique.
        about: one line for a reader.
        asks: makes the requests, in the order in which they are served.
        blocks: pool sizes in blocks by geometry name, from "the largest request
            fits" to "everything fits".
    """

    name: str
    about: str
    asks: Callable[[], list[Ask]]
    blocks: dict[str, tuple[int, ...]]


class Chat:
    """A conversation: each turn repeats all that was said before it."""

    def __init__(self, name: str, *opening: Text) -> None:
        self.name = name
        self.history = opening
        self.turns = 0

    def ask(self, user: int, output: int) -> Ask:
        """The next turn: ``user`` tokens asked, ``output`` tokens answered."""
        self.turns += 1
        name = f"{self.name} turn {self.turns}"
        prompt = (*self.history, Text(f"{name} user", user))
        ask = Ask(name, prompt, Text(f"{name} output", output))
        self.history = (*prompt, ask.output)
        return ask


def session_switch() -> list[Ask]:
    """Six long chats; the user stays for a turn or two, then goes to another."""
    rng = random.Random(SEED)
    chats = [
        Chat(f"session {i}", Text(f"session {i} opening", rng.randint(20_000, 90_000)))
        for i in range(6)
    ]
    asks, chat = [], chats[0]
    for _ in range(72):
        if rng.random() < 0.6:
            chat = rng.choice(chats)
        asks.append(chat.ask(rng.randint(50, 1_500), rng.randint(50, 500)))
    return asks


def agents() -> list[Ask]:
    """Ten agents with one system prompt: growing turns, edits, one-off documents."""
    rng = random.Random(SEED + 1)
    system = Text("agents system prompt", 20_000)
    chats = [Chat(f"agent {i}", system) for i in range(10)]
    asks: list[Ask] = []
    for i in range(160):
        if i % 16 == 15:
            document = Text(f"document {i}", 120_000)
            asks.append(Ask(f"document {i}", (document,), Text(f"summary {i}", 300)))
            continue
        chat = rng.choice(chats)
        if chat.turns and rng.random() < 0.2:
            chat.history = _edited(chat.history, f"edit {i}", rng)
        asks.append(chat.ask(rng.randint(300, 4_000), rng.randint(50, 400)))
    return asks


def _edited(history: tuple[Text, ...], key: str, rng: random.Random) -> tuple:
    """History with its last few tokens said differently."""
    *kept, last = history
    cut = min(rng.randint(1, 200), last.tokens - 1)
    return (*kept, Text(last.key, last.tokens - cut, last.start), Text(key, cut))


def branches() -> list[Ask]:
    """Three trees: each request leaves an earlier one at a random place."""
    rng = random.Random(SEED + 2)
    trees = [
        [(Text(f"tree {i} root", size),)]
        for i, size in enumerate((60_000, 30_000, 45_000))
    ]
    asks = [_leaf(f"tree {i} root", tree[0]) for i, tree in enumerate(trees)]
    for i in range(100):
        tree = rng.choice(trees)
        parent = tree[max(rng.randrange(len(tree)), rng.randrange(len(tree)))]
        length = sum(text.tokens for text in parent)
        kept = cut_at(parent, rng.randint(length // 3, length))
        prompt = (*kept, Text(f"branch {i}", rng.randint(200, 4_000)))
        tree.append(prompt)
        asks.append(_leaf(f"branch {i}", prompt))
    return asks


def _leaf(name: str, prompt: tuple[Text, ...]) -> Ask:
    return Ask(name, prompt, Text(f"{name} output", 200))


def cut_at(pieces: tuple[Text, ...], tokens: int) -> Iterator[Text]:
    """The first ``tokens`` tokens of a prompt."""
    for piece in pieces:
        yield Text(piece.key, min(piece.tokens, tokens), piece.start)
        tokens -= piece.tokens
        if tokens <= 0:
            return


def short_chats() -> list[Ask]:
    """Many short chats with three assistants, about forty at a time."""
    rng = random.Random(SEED + 3)
    systems = [
        Text(f"assistant {i}", size) for i, size in enumerate((900, 1_700, 3_100))
    ]
    active: list[tuple[Chat, int]] = []
    asks: list[Ask] = []
    for i in range(900):
        if len(active) < 40:
            chat = Chat(f"chat {i}", rng.choice(systems))
            active.append((chat, rng.randint(1, 8)))
        chat, last_turn = rng.choice(active)
        asks.append(chat.ask(rng.randint(20, 500), rng.randint(20, 400)))
        if chat.turns == last_turn:
            active.remove((chat, last_turn))
    return asks


def documents() -> list[Ask]:
    """Questions about twelve long documents, some asked far more often."""
    rng = random.Random(SEED + 4)
    header = Text("instructions", 350)
    texts = [Text(f"book {i}", rng.randint(25_000, 100_000)) for i in range(12)]
    weights = [1 / (rank + 1) for rank in range(len(texts))]
    asks: list[Ask] = []
    for i in range(70):
        text = rng.choices(texts, weights)[0]
        chat = Chat(f"question {i}", header, text)
        for _ in range(rng.choice((1, 1, 2))):
            asks.append(chat.ask(rng.randint(20, 300), rng.randint(50, 250)))
    return asks


def returning_sessions(sessions: int, tokens: int, returns: int) -> list[Ask]:
    """Every session comes once, then ``returns`` times one comes back at random."""
    rng = random.Random(SEED + 5)
    chats = [Chat(f"long {i}", Text(f"long {i}", tokens)) for i in range(sessions)]
    visits = chats + rng.choices(chats, k=returns)
    return [chat.ask(200, 50) for chat in visits]


_DEEPSEEK, _GEMMA = "deepseek-v4-flash", "gemma"
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "session_switch",
            "six long chats, one user who switches between them",
            session_switch,
            {
                _DEEPSEEK: (4_500, 6_000, 9_000, 15_000, 30_000, 60_000),
                _GEMMA: (9_000, 14_000, 24_000, 40_000, 80_000, 200_000),
            },
        ),
        Workload(
            "agents",
            "ten agents, one system prompt, edits, one-off 120k documents",
            agents,
            {
                _DEEPSEEK: (4_500, 6_000, 12_000, 24_000, 60_000, 250_000),
                _GEMMA: (9_000, 14_000, 24_000, 60_000, 200_000, 800_000),
            },
        ),
        Workload(
            "branches",
            "three trees of prompts that branch anywhere",
            branches,
            {
                _DEEPSEEK: (4_500, 6_000, 9_000, 15_000, 40_000, 120_000),
                _GEMMA: (9_000, 14_000, 24_000, 60_000, 200_000, 500_000),
            },
        ),
        Workload(
            "short_chats",
            "many short chats with three assistants",
            short_chats,
            {
                _DEEPSEEK: (4_500, 6_000, 9_000, 15_000, 40_000, 120_000),
                _GEMMA: (9_000, 14_000, 24_000, 60_000, 120_000, 300_000),
            },
        ),
        Workload(
            "documents",
            "questions about twelve long documents",
            documents,
            {
                _DEEPSEEK: (4_500, 6_000, 9_000, 15_000, 40_000, 120_000),
                _GEMMA: (9_000, 14_000, 24_000, 60_000, 120_000, 300_000),
            },
        ),
    )
}
