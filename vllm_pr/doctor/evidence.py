# SPDX-License-Identifier: Apache-2.0
"""What the doctor saw: plain records, written to and read from JSON."""

from dataclasses import dataclass, field
from math import gcd
from typing import Literal

import msgspec

Interval = int | Literal["None"] | None
EDITED = "A, end edited"


@dataclass
class Server:
    """What the server says about itself.

    Attributes:
        url: Base URL, without ``/v1``.
        engine: ``"vllm"``, or ``"other"`` for any other engine behind the same API.
        version: Answer of ``/version``, None without one.
        model: Name used in requests.
        max_model_len: Longest request in tokens, None when not told.
        endpoint: ``"chat"``, or ``"completions"`` for a model without chat template.
        metrics: Whether ``/metrics`` has vLLM's counters.
        tokenizer: Whether ``/tokenize`` answers.
        usage_details: Whether ``usage`` carries cached tokens.
        caching: Whether prefix caching is on, None when not told.
        interval: Retention interval in tokens, ``"None"`` for dense checkpoints, None
            when not told (before 0.29, or without metrics).
        blocks: Blocks in the pool.
        block_size: Tokens per block, as configured.
        capacity_tokens: Tokens of longest requests that the pool holds at once.
        alignment: Tokens between the places where a hit can end, as configured.
        spec_decode: Whether speculative decoding counters exist.
        engines: Number of engines (data parallel) behind the URL.
        dense_group_only: Every layer keeps every token (no window): the pool's
            capacity is then blocks x block size. None when not known.
    """

    url: str
    engine: Literal["vllm", "other"] = "other"
    version: str | None = None
    model: str = ""
    max_model_len: int | None = None
    endpoint: Literal["chat", "completions"] = "chat"
    metrics: bool = False
    tokenizer: bool = False
    usage_details: bool = False
    caching: bool | None = None
    interval: Interval = None
    blocks: int | None = None
    block_size: int | None = None
    capacity_tokens: int | None = None
    alignment: int | None = None
    spec_decode: bool = False
    engines: int = 1
    dense_group_only: bool | None = None


@dataclass
class Reply:
    """One request and what came of it.

    Attributes:
        name: What the request is for, unique in one run.
        prompt_tokens: Tokens of the rendered prompt.
        cached_tokens: Tokens served from the prefix cache, None when not known.
        cached_from: Where that figure is from.
        shared_tokens: Leading tokens that an earlier prompt of this run also had.
        ttft_s: Seconds from sending to the first token.
        peak_usage: Largest share of the pool in use while it ran, 0 to 1.
        preemptions: Preemptions counted while it ran.
        foreign_tokens: Tokens of other clients counted while it ran.
        external_tokens: Tokens that a KV connector loaded.
        engines: Engines whose counters moved.
    """

    name: str
    prompt_tokens: int
    cached_tokens: int | None = None
    cached_from: Literal["usage", "counters", "unknown"] = "unknown"
    shared_tokens: int = 0
    ttft_s: float = 0.0
    peak_usage: float | None = None
    preemptions: int = 0
    foreign_tokens: int = 0
    external_tokens: int = 0
    engines: list[str] = field(default_factory=list)


@dataclass
class Switch:
    """One return to a session after other sessions.

    Attributes:
        session: Name of the session that was left and came back.
        reply: Name of the request with which it came back.
        session_tokens: Its prompt tokens.
        between_tokens: Prompt tokens of the doctor's other sessions in between, those
            that were found in the cache not counted.
        between_sessions: How many sessions that were.
        foreign_tokens: Tokens of other clients in between.
        foreign_requests: Requests of other clients that ended in between.
        cached_before: Tokens cached on the last immediate resend.
        cached_after: Tokens cached on the return.
    """

    session: str
    reply: str
    session_tokens: int
    between_tokens: int
    between_sessions: int
    foreign_tokens: int
    foreign_requests: int
    cached_before: int | None
    cached_after: int | None


@dataclass
class Template:
    """Whether the chat template renders a growing history onto the same prefix.

    Attributes:
        stable_in_time: The same messages rendered twice gave the same tokens.
        previous_tokens: Prompt tokens of the first turn.
        kept_tokens: How many of them the second turn's prompt begins with.
        answer_kept: The generated answer was rendered as the tokens generated; None
            when it could not be compared.
    """

    stable_in_time: bool
    previous_tokens: int
    kept_tokens: int
    answer_kept: bool | None = None


@dataclass
class Traffic:
    """What other clients did during the whole run.

    Attributes:
        known: Whether the counters could be read.
        requests: Requests finished that the doctor did not send.
        tokens: Prompt and output tokens of other clients.
        running: Most requests of others seen running or waiting at once.
        restarted: The server process changed during the run.
        preemptions_before: Preemptions counted since the server's start, before the
            run.
        preemptions: Preemptions during the run.
    """

    known: bool = False
    requests: int = 0
    tokens: int = 0
    running: int = 0
    restarted: bool = False
    preemptions_before: int = 0
    preemptions: int = 0

    @property
    def seen(self) -> bool:
        """Whether another client used the server during the run."""
        return self.requests > 0 or self.tokens > 0 or self.running > 0


@dataclass
class Plan:
    """What the doctor sends, fixed before the first request.

    Attributes:
        session_tokens: Prompt tokens of sessions A and B.
        part_tokens: Prompt tokens of the sessions of the other probes, at most.
        short_tokens: Prompt tokens of the short prompt.
        short_wanted: Whether the operator's own sessions are that short.
        switch_tokens: Most tokens of other sessions in one round between A and its
            return.
        target_tokens: Tokens in between that A must survive to be called healthy;
            None when not known.
        long_tokens: Prompt tokens of the two sessions of the capacity probe, 0 for
            none.
        bound_tokens: Most prompt tokens sent in all.
        bound_requests: Most requests sent in all.
    """

    session_tokens: int
    part_tokens: int
    short_tokens: int
    short_wanted: bool
    switch_tokens: int
    target_tokens: int | None
    long_tokens: int
    bound_tokens: int
    bound_requests: int


@dataclass
class Evidence:
    """All of one run."""

    server: Server
    plan: Plan | None = None
    replies: list[Reply] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    template: Template | None = None
    traffic: Traffic = field(default_factory=Traffic)
    skipped: list[str] = field(default_factory=list)
    stopped: str | None = None

    def reply(self, name: str) -> Reply | None:
        """The request called ``name``, None when it was not sent."""
        return next((r for r in self.replies if r.name == name), None)

    @property
    def alignment_seen(self) -> int | None:
        """What the hit alignment in tokens appears to be, None without a hit.

        All hit lengths are multiples of it, and a prompt that was just sent leaves less
        than it uncached: the smallest such number of whole blocks.
        """
        divisor = gcd(*(r.cached_tokens or 0 for r in self.replies))
        again = (
            r for r in self.replies if r.name.endswith(" again") and r.cached_tokens
        )
        left = max((_uncached_end(r) for r in again), default=0)
        block = self.server.block_size or divisor
        sizes = range(block, divisor + 1, block) if divisor else ()
        fitting = (n for n in sizes if divisor % n == 0 and n > left)
        return next(fitting, divisor) or None

    @property
    def alignment(self) -> int | None:
        """The configured hit alignment in tokens, else the one that was seen."""
        return self.server.alignment or self.alignment_seen

    @property
    def window_blocks(self) -> float | None:
        """Blocks that a running request takes beside those that grow with its length.

        The windows of sliding-window groups and one step's tokens in them, from the
        capacity that the server reports: blocks = requests x (length / block size +
        this). None when it does not report one.
        """
        server = self.server
        known = (server.blocks, server.block_size, server.capacity_tokens)
        if not all(known) or not server.max_model_len:
            return None
        blocks, block_size, capacity = known
        per_request = blocks * server.max_model_len / capacity
        return max(0.0, per_request - server.max_model_len / block_size)

    def blocks_needed(self, tokens: int, sessions: int) -> float | None:
        """Blocks that certainly hold ``sessions`` sessions of ``tokens`` tokens in all.

        One runs, with windows and a step's tokens; of each other at most half as much
        is kept beside its tokens, a step being no shorter than a window.
        """
        windows = self.window_blocks
        if windows is None:
            return None
        return tokens / self.server.block_size + windows * (sessions + 1) / 2

    def fits(self, tokens: int, sessions: int) -> bool | None:
        """Whether sessions certainly fit in the pool side by side; None: not known.

        Without a reported capacity, two fit that are no longer together than the
        longest request: vLLM does not start with a pool too small for one.
        """
        if self.server.engine != "vllm":
            return None
        needed = self.blocks_needed(tokens, sessions)
        if needed is not None:
            return needed < self.server.blocks
        longest = self.server.max_model_len
        return True if longest and sessions <= 2 and tokens <= longest else None

    @property
    def fits_tokens(self) -> int | None:
        """Tokens of one longest request after another that the pool holds at once.

        The larger of what the server reports as capacity and of its longest request:
        vLLM does not start with a pool too small for one.
        """
        if self.server.engine != "vllm":
            return None
        known = (self.server.capacity_tokens, self.server.max_model_len)
        return max((n for n in known if n), default=None)


def _uncached_end(reply: Reply) -> int:
    """Tokens at the end of a prompt sent before that did not hit, without the last."""
    whole = reply.shared_tokens == reply.prompt_tokens
    return reply.prompt_tokens - 1 - (reply.cached_tokens or 0) if whole else 0


def to_json(evidence: Evidence) -> bytes:
    """Evidence as JSON."""
    return msgspec.json.encode(evidence)


def from_json(text: bytes | str) -> Evidence:
    """Evidence read back from `to_json`.

    Raises:
        msgspec.ValidationError: The text does not have that form.
    """
    return msgspec.json.decode(text, type=Evidence)
