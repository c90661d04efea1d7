# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with the tiny DeepSeek-V4 on changed, used as its users use it.

The tokenizer maps one character to one token, and every chat starts with the same
256-token prelude, so the length of a prompt and of what it shares with earlier ones is
known exactly. A prefix-cache hit ends at a multiple of the model's alignment and
leaves at least one token to compute.
"""

import asyncio
import random
import string
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types import CompletionUsage
from prometheus_client.parser import text_string_to_metric_families

from vllm_pr.doctor.client import NO_KEEP_ALIVE
from vllm_pr.engine.models import tiny_model
from vllm_pr.engine.server import Server, serve
from vllm_pr.engine.tokenizer import PRELUDE_TOKENS

MODEL = "dsv4-tiny"
ALIGNMENT = tiny_model(MODEL).alignment
BLOCKS = 2_000
MARKERS = len(("<|user|>", "<|end|>"))
OPENING = len(("<|assistant|>",))
ANSWER = 8


@pytest.fixture(scope="module")
def totals(figure) -> Iterator[Counter]:
    """Summed over all tests, what the server itself counted."""
    summed: Counter = Counter()
    yield summed
    figure("serve_prompt_tokens", int(summed["queries"]))
    figure("serve_tokens_from_cache", int(summed["hits"]))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(MODEL, "changed", blocks=BLOCKS) as running:
        yield running


@dataclass
class Metrics:
    """What ``/metrics`` says, summed over labels."""

    values: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> "Metrics":
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                reason = sample.labels.get("finished_reason")
                name = f"{sample.name}:{reason}" if reason else sample.name
                values[name] = values.get(name, 0.0) + sample.value
        return cls(values)

    def __getitem__(self, name: str) -> float:
        return self.values[f"vllm:{name}"]


class Pool:
    """The server's own account: totals since this object was made."""

    def __init__(self, http: httpx.AsyncClient, totals: Counter) -> None:
        self._http = http
        self._totals = totals

    async def metrics(self) -> Metrics:
        response = await self._http.get("/metrics")
        return Metrics.parse(response.raise_for_status().text)

    @asynccontextmanager
    async def counts(self) -> AsyncIterator[dict[str, float]]:
        """Filled at the end: prompt tokens that were looked up, and found."""
        names = {
            "queries": "prefix_cache_queries_total",
            "hits": "prefix_cache_hits_total",
            "generated": "generation_tokens_total",
            "finished": "request_success_total:length",
            "preempted": "num_preemptions_total",
        }
        before = await self.metrics()
        counted: dict[str, float] = {}
        yield counted
        after = await self.settled()
        counted |= {key: after[name] - before[name] for key, name in names.items()}
        self._totals.update(counted)

    async def settled(self, seconds: float = 60.0) -> Metrics:
        """The metrics once no request is left and every block is free again."""
        busy = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"
        async with asyncio.timeout(seconds):
            while True:
                metrics = await self.metrics()
                if not any(metrics[name] for name in busy):
                    return metrics
                await asyncio.sleep(0.1)


@pytest_asyncio.fixture
async def pool(server: Server, totals: Counter) -> AsyncIterator[Pool]:
    """An empty prefix cache."""
    async with httpx.AsyncClient(
        base_url=server.url, trust_env=False, limits=NO_KEEP_ALIVE
    ) as http:
        (await http.post("/reset_prefix_cache")).raise_for_status()
        yield Pool(http, totals)


@pytest_asyncio.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx.AsyncClient(trust_env=False, timeout=300.0, limits=NO_KEEP_ALIVE)
    base_url = f"{server.url}/v1"
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="none", http_client=http, max_retries=0
    ) as made:
        yield made


@dataclass
class Chat:
    """One user's conversation.

    Attributes:
        client: The OpenAI client.
        user: Seed of this user's texts.
        messages: All messages so far.
        tokens: Tokens of the conversation, the opened answer included.
    """

    client: openai.AsyncOpenAI
    user: str
    messages: list[dict[str, str]] = field(default_factory=list)
    tokens: int = PRELUDE_TOKENS

    def say(self, length: int) -> None:
        """Add a message of ``length`` tokens that no other user sends."""
        dice = random.Random(f"{self.user} {len(self.messages)}")
        text = "".join(dice.choices(string.ascii_lowercase, k=length))
        self._add("user", text)

    async def ask(self) -> CompletionUsage:
        """Send the conversation, add the answer, return the usage."""
        done = await self.client.chat.completions.create(**self.request())
        assert done.usage.prompt_tokens == self.tokens + OPENING
        self._add("assistant", done.choices[0].message.content)
        return done.usage

    def request(self, answer: int = ANSWER, **more) -> dict:
        """Arguments of a greedy completion of ``answer`` tokens."""
        return {
            "model": MODEL,
            "messages": self.messages,
            "temperature": 0.0,
            "max_tokens": answer,
            "extra_body": {"ignore_eos": True},
            **more,
        }

    def _add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})
        self.tokens += len(content) + MARKERS


def cached(usage: CompletionUsage) -> int:
    details = usage.prompt_tokens_details
    return details.cached_tokens if details else 0


def hit(common: int) -> int:
    """Cached tokens of a prompt that shares ``common`` tokens with earlier ones."""
    return common // ALIGNMENT * ALIGNMENT


async def test_second_user_gets_the_prelude_from_the_first(client, pool):
    first, second = Chat(client, "first"), Chat(client, "second")
    for chat in (first, second):
        chat.say(ALIGNMENT + 100)
    async with pool.counts() as counts:
        usages = [await first.ask(), await second.ask()]
    assert [cached(usage) for usage in usages] == [0, hit(PRELUDE_TOKENS)]
    assert counts["hits"] == PRELUDE_TOKENS
    assert counts["queries"] == sum(usage.prompt_tokens for usage in usages)


async def test_two_users_switch_and_each_finds_all_of_his_own(client, pool):
    chats = Chat(client, "ann"), Chat(client, "bob")
    expected, usages = [], []
    async with pool.counts() as counts:
        for turn in range(3):
            for chat in chats:
                # The last sampled token is in the text, but was never computed.
                seen = chat.tokens - len(("<|end|>",)) - 1
                other = PRELUDE_TOKENS if turn or chat is chats[1] else 0
                expected.append(hit(seen if turn else other))
                chat.say(300 - 90 * turn)
                usages.append(await chat.ask())
    assert [cached(usage) for usage in usages] == expected
    assert max(expected) > PRELUDE_TOKENS
    assert counts["hits"] == sum(expected)
    assert counts["queries"] == sum(usage.prompt_tokens for usage in usages)
    assert counts["preempted"] == 0


async def test_eight_users_at_once(client, pool):
    warm = Chat(client, "warm")
    warm.say(100)
    await warm.ask()
    chats = [Chat(client, f"user {number}") for number in range(8)]
    for length, expected in ((280, PRELUDE_TOKENS), (50, 2 * ALIGNMENT)):
        for chat in chats:
            chat.say(length)
        async with pool.counts() as counts:
            usages = await asyncio.gather(*(chat.ask() for chat in chats))
        assert [cached(usage) for usage in usages] == [expected] * 8
        assert counts["hits"] == 8 * expected
        assert counts["queries"] == sum(usage.prompt_tokens for usage in usages)


async def test_streaming_tells_the_same(client, pool):
    chat = Chat(client, "streamer")
    chat.say(ALIGNMENT + 50)
    for _ in range(2):
        whole = await client.chat.completions.create(**chat.request())
    async with pool.counts() as counts:
        stream = await client.chat.completions.create(
            **chat.request(stream=True, stream_options={"include_usage": True})
        )
        chunks = [chunk async for chunk in stream]
    usage = chunks[-1].usage
    text = "".join(x.choices[0].delta.content or "" for x in chunks if x.choices)
    assert text == whole.choices[0].message.content
    assert len(text) == usage.completion_tokens == ANSWER
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert cached(usage) == cached(whole.usage) == hit(chat.tokens) == 2 * ALIGNMENT
    assert counts["hits"] == 2 * ALIGNMENT


async def test_client_that_hangs_up_half_way_costs_nothing(client, pool):
    chat = Chat(client, "hangs up")
    chat.say(ALIGNMENT + 60)
    async with pool.counts() as counts:
        stream = await client.chat.completions.create(
            **chat.request(answer=2_000, stream=True)
        )
        read = 0
        async for chunk in stream:
            read += len(chunk.choices[0].delta.content or "")
            if read > 3:
                break
        await stream.close()
    assert read < counts["generated"] + 1 < 1_000
    assert counts["finished"] == 0
    assert counts["hits"] == 0
    async with pool.counts() as counts:
        usage = await chat.ask()
    assert cached(usage) == counts["hits"] == hit(chat.tokens) == 2 * ALIGNMENT
    assert counts["finished"] == 1
