# SPDX-License-Identifier: Apache-2.0
"""The requests that the doctor sends, and what it notes about each."""

import asyncio
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from vllm_pr.doctor.client import Answer, Api, Messages
from vllm_pr.doctor.errors import DoctorError
from vllm_pr.doctor.evidence import (
    EDITED,
    Evidence,
    Reply,
    Server,
    Switch,
    Template,
)
from vllm_pr.doctor.metrics import Snapshot, describe
from vllm_pr.doctor.plan import hit_alignment, make_plan, rounds, smallest_session
from vllm_pr.doctor.writer import Writer

POLL_SECONDS = 0.2
SETTLE_SECONDS = 3.0
# Rounds of other sessions may use this share of the time that is left.
ROUNDS_SHARE = 0.6


def user(text: str) -> Messages:
    """A chat of one message."""
    return [{"role": "user", "content": text}]


def common_prefix(left: list[int], right: list[int]) -> int:
    """Number of leading tokens that both have."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


@dataclass
class Watch:
    """What was seen while a request ran."""

    peak_usage: float | None = None
    others: int = 0


class Probes:
    """One run against one server; what it learns is in ``evidence``."""

    def __init__(
        self,
        api: Api,
        *,
        prompt_tokens: int | None = None,
        switch_tokens: int | None = None,
        time_limit: float = 270.0,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Args:
        api: The server.
        prompt_tokens: Length of the operator's sessions, None for a default.
        switch_tokens: Most tokens between A and its return, None for a default.
        time_limit: Seconds after which no further probe is started.
        progress: Called several times a second with what is going on.
        """
        self.api = api
        self.evidence = Evidence(Server(url=api.url))
        self._sizes = (prompt_tokens, switch_tokens)
        self._deadline = 0.0
        self._time_limit = time_limit
        self._progress = progress
        self._writer = Writer()
        self._overhead = 0
        self._prompts: list[list[int]] = []
        self._rendered: dict[str, list[int]] = {}
        self._stable = True
        self._first = Snapshot()
        self._last = Snapshot()
        self._own_requests = 0
        self._own_tokens = 0
        self._own_fresh = 0
        self._own_sessions = 0
        self._taken = 0, 0  # tokens and sessions before the last request
        self._tokens_per_second = 0.0

    # -- before the first prompt ------------------------------------------------

    async def look(self, model: str | None) -> None:
        """Read what the server says about itself and fix the plan; sends no prompt.

        Args:
            model: Name of the model, None for the first that is served.

        Raises:
            DoctorError: Nothing there, no such API, no such model, too short a context.
        """
        server = self.evidence.server
        await self._choose_model(model)
        version = await self.api.get_json("/version")
        found = (version or {}).get("version")
        server.version = found if isinstance(found, str) else None
        self._first = self._last = await self.api.metrics()
        describe(self._first, server)
        await self._try_tokenizer()
        self.evidence.traffic.preemptions_before = int(self._first.total["preemptions"])
        self.evidence.plan = make_plan(
            server, self._overhead, self.evidence.fits_tokens, *self._sizes
        )

    async def _choose_model(self, wanted: str | None) -> None:
        server = self.evidence.server
        listed = await self.api.get_json("/v1/models")
        models = (listed or {}).get("data")
        models = models if isinstance(models, list) else []
        models = [model for model in models if isinstance(model, dict)]
        if not models:
            raise DoctorError(
                f"{server.url} has no OpenAI API (/v1/models): is this the right URL?"
            )
        names = [str(m.get("id")) for m in models]
        if wanted and wanted not in names:
            raise DoctorError(
                f"the server has no model {wanted!r}: it serves {', '.join(names)}"
            )
        bases = [m for m in models if not m.get("parent")] or models
        card = next((m for m in models if m.get("id") == wanted), bases[0])
        server.model = self.api.model = str(card.get("id"))
        context = card.get("max_model_len")
        if type(context) is int and context > 0:
            server.max_model_len = context
        if any(m.get("owned_by") == "vllm" for m in models):
            server.engine = "vllm"

    async def _try_tokenizer(self) -> None:
        """Find out whether ``/tokenize`` answers, and what the chat template adds."""
        server = self.evidence.server
        word = self._writer.words(40)
        rendered = await self.api.tokenize(user(word))
        if rendered is None:
            self.api.endpoint = server.endpoint = "completions"
            rendered = await self.api.tokenize(user(word))
        if rendered is None:
            self.api.endpoint = server.endpoint = "chat"
            return
        server.tokenizer = True
        twice = await self.api.tokenize(user(word + " " + word)) or rendered
        text_tokens = len(twice) - len(rendered)
        self._writer.tokens_per_char = max(text_tokens, 1) / (len(word) + 1)
        self._overhead = max(0, len(rendered) - text_tokens)

    # -- one request -------------------------------------------------------------

    async def send(
        self, name: str, *chats: Messages, shared: int = 0, **extra: object
    ) -> tuple[Reply, Answer]:
        """Send one request, or several at once, and note what came of it.

        Args:
            name: What to call it.
            chats: The prompts.
            shared: Leading tokens known to an earlier prompt, for a server that does
                not tell tokens.
            extra: More fields of the request.
        """
        known = [await self._known_prefix(chat) for chat in chats]
        before = self._last = await self.api.metrics()
        async with self._watch(name, len(chats)) as watch:
            answers = await _all(self.api.ask(chat, **extra) for chat in chats)
        prompt = sum(
            a.prompt_tokens or k[1] or self._estimate(c)
            for a, k, c in zip(answers, known, chats, strict=True)
        )
        self._own_requests += len(chats)
        self._own_tokens += prompt + len(chats)
        after = await self._settled(before, len(chats), prompt)
        reply = Reply(
            name,
            prompt,
            shared_tokens=sum(k[0] for k in known) or shared,
            ttft_s=max(a.ttft_s for a in answers),
            peak_usage=watch.peak_usage,
        )
        self._note(reply, answers, before, after, watch)
        self._taken = self._own_fresh, self._own_sessions
        self._count_fresh(reply, len(chats))
        return reply, answers[0]

    def _count_fresh(self, reply: Reply, sessions: int) -> None:
        """Count what the pool has to hold in addition.

        What is computed again is held twice. The template's start counts as computed.
        """
        prelude = sessions * (self._overhead + self._unit())
        held = min(reply.shared_tokens, reply.cached_tokens or 0)
        fresh = reply.prompt_tokens - (held if held > prelude else 0)
        if fresh > self._unit():
            self._own_fresh += fresh
            self._own_sessions += sessions

    async def _known_prefix(self, chat: Messages) -> tuple[int, int]:
        """Tokens of ``chat`` sent before, and all its tokens; 0 where not known."""
        if not self.evidence.server.tokenizer:
            return 0, 0
        tokens = await self.api.tokenize(chat)
        if tokens is None:
            return 0, 0
        key = repr(chat)
        self._stable = self._stable and self._rendered.setdefault(key, tokens) == tokens
        shared = max((common_prefix(tokens, old) for old in self._prompts), default=0)
        self._prompts.append(tokens)
        return shared, len(tokens)

    def _estimate(self, chat: Messages) -> int:
        characters = sum(len(m["content"]) for m in chat)
        return self._overhead + int(characters * self._writer.tokens_per_char)

    def _note(
        self,
        reply: Reply,
        answers: list[Answer],
        before: Snapshot,
        after: Snapshot,
        watch: Watch,
    ) -> None:
        """Complete ``reply`` from usage and counters, and file it."""
        evidence, server = self.evidence, self.evidence.server
        traffic = evidence.traffic
        if server.metrics:
            own = reply.prompt_tokens + len(answers)
            reply.foreign_tokens = max(0, _work(before, after) - own)
            reply.preemptions = max(0, after.since(before, "preemptions"))
            reply.external_tokens = max(0, after.since(before, "external_hits"))
            reply.engines = after.moved(before)
            others = before.total["running"] + before.total["waiting"]
            traffic.running = max(traffic.running, int(others), watch.others)
        self._count_cached(reply, answers, before, after)
        cold = reply.prompt_tokens - (reply.cached_tokens or 0)
        if reply.ttft_s > 0 and cold > reply.prompt_tokens / 2:
            self._tokens_per_second = cold / reply.ttft_s
        evidence.replies.append(reply)
        self._count_traffic(after)

    def _count_cached(
        self, reply: Reply, answers: list[Answer], before: Snapshot, after: Snapshot
    ) -> None:
        server = self.evidence.server
        told = [a.cached_tokens for a in answers]
        server.usage_details |= any(n is not None for n in told)
        if server.usage_details and (server.engine == "vllm" or None not in told):
            reply.cached_tokens = sum(n or 0 for n in told)
            reply.cached_from = "usage"
        elif server.metrics and not reply.foreign_tokens:
            hits = after.since(before, "hits") + reply.external_tokens
            reply.cached_tokens = min(max(0, hits), reply.prompt_tokens)
            reply.cached_from = "counters"

    def _count_traffic(self, after: Snapshot) -> None:
        traffic, first = self.evidence.traffic, self._first
        traffic.known = self.evidence.server.metrics and after.vllm
        if not traffic.known:
            return
        traffic.restarted |= first.started != after.started
        traffic.requests = max(0, after.since(first, "finished") - self._own_requests)
        traffic.tokens = max(0, _work(first, after) - self._own_tokens)
        traffic.preemptions = max(0, after.since(first, "preemptions"))
        self._last = after

    async def _settled(self, before: Snapshot, requests: int, tokens: int) -> Snapshot:
        """The counters once they include what was just sent."""
        until = time.monotonic() + SETTLE_SECONDS
        while True:
            after = await self.api.metrics()
            counted = (
                after.since(before, "finished") >= requests
                and after.since(before, "prompt_tokens") >= tokens
            )
            if not after.vllm or counted or time.monotonic() > until:
                return after
            await asyncio.sleep(0.05)

    @asynccontextmanager
    async def _watch(self, name: str, requests: int):
        """Poll pool usage and running requests, and keep the progress line alive."""
        watch, started = Watch(), time.monotonic()

        async def poll() -> None:
            pause = POLL_SECONDS / 8  # soon at first: a short request is seen as well
            while True:
                await asyncio.sleep(pause)
                pause = min(2 * pause, POLL_SECONDS)
                seen = await self.api.metrics()
                line = f"{name}: {time.monotonic() - started:.1f} s"
                if seen.vllm and seen.usage is not None:
                    watch.peak_usage = max(watch.peak_usage or 0.0, seen.usage)
                    active = seen.total["running"] + seen.total["waiting"]
                    watch.others = max(watch.others, int(active) - requests)
                    line += f", pool {seen.usage:.0%} in use"
                self._progress(line)

        self._progress(name)
        task = asyncio.create_task(poll())
        try:
            yield watch
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # -- the probes --------------------------------------------------------------

    async def run(self) -> Evidence:
        """Send everything that the plan and the time allow.

        With prefix caching off there is nothing to see beyond a resend. A server that
        fails in the middle ends the run: ``evidence.stopped`` says how.
        """
        self._deadline = time.monotonic() + self._time_limit
        try:
            await self._short_prompt()
            await self._session_twice()
            if self.evidence.server.caching is not False:
                await self._branch()
                await self._system_prompt()
                await self._switches()
                await self._conversation()
                await self._two_at_once()
                await self._long_sessions()
        except DoctorError as error:
            self.evidence.stopped = str(error)
        self._complete_usage()
        if self.evidence.template:
            self.evidence.template.stable_in_time = self._stable
        elif self.evidence.server.tokenizer and not self._stable:
            self.evidence.template = Template(False, 0, 0)
        return self.evidence

    def _complete_usage(self) -> None:
        """Some releases leave a zero out of usage: known once a hit was told."""
        server = self.evidence.server
        if not server.usage_details or server.engine != "vllm":
            return
        for reply in self.evidence.replies:
            if reply.cached_tokens is None:
                reply.cached_tokens, reply.cached_from = 0, "usage"

    async def _short_prompt(self) -> None:
        """The same short prompt twice; it measures tokens where nothing tells them."""
        plan = self.evidence.plan
        chat = user(await self._text(plan.short_tokens - self._overhead))
        try:
            reply, _ = await self.send("short prompt", chat)
        except DoctorError as error:
            if self.api.endpoint != "chat" or "template" not in str(error).lower():
                raise
            self.api.endpoint = self.evidence.server.endpoint = "completions"
            reply, _ = await self.send("short prompt", chat)
        await self.send("short prompt again", chat, shared=reply.prompt_tokens)
        if not self.evidence.server.tokenizer:
            await self._calibrate(chat, reply)

    async def _calibrate(self, chat: Messages, reply: Reply) -> None:
        """Tokens per character, from the difference between two prompts."""
        text = chat[0]["content"]
        longer = self._writer.words(len(text) + 200)
        more, _ = await self.send("calibration", user(longer))
        grown = more.prompt_tokens - reply.prompt_tokens
        if grown > 0:
            self._writer.tokens_per_char = grown / (len(longer) - len(text))
            inside = int(len(text) * self._writer.tokens_per_char)
            self._overhead = max(0, reply.prompt_tokens - inside)

    async def _session_twice(self) -> None:
        """A, at once A again, A with another end, and A."""
        self._a = user(await self._session_text(self.evidence.plan.session_tokens))
        first, _ = await self.send("A", self._a)
        self._again, _ = await self.send("A again", self._a, shared=first.prompt_tokens)
        self._leave()
        if self.evidence.server.caching is not False:
            await self._edit(first.prompt_tokens)
            await self._return_to_a("A after edit")

    async def _edit(self, prompt_tokens: int) -> None:
        """A, its end edited: what hits lies below the end that every setting keeps.

        Two alignments and a half go, so that with EAGLE/MTP, which gives one up, this
        still holds. A prefill's last checkpoints outlive it however full the pool is.
        """
        text, cut = self._a[0]["content"], int(2.5 * self._unit())
        kept = text[: len(text) - int(cut / self._writer.tokens_per_char)]
        tail = await self._text(self._unit())
        chat = user(kept + " " + tail)
        await self.send(EDITED, chat, shared=max(0, prompt_tokens - cut))

    def _leave(self) -> None:
        """Remember the counters at the end of a session's turn."""
        self._left = self._last
        self._left_own = (
            self._own_tokens,
            self._own_fresh,
            self._own_sessions,
            self._own_requests,
        )

    async def _switches(self) -> None:
        """A after all that came meanwhile, then rounds of other sessions and A."""
        await self._return_to_a("A before B")
        spare = ROUNDS_SHARE * (self._deadline - time.monotonic())
        until = time.monotonic() + spare
        for number, size in enumerate(rounds(self.evidence.plan)):
            if number and not self._affordable(size, until, "more sessions than one"):
                return
            if not await self._round(number, size):
                return

    async def _round(self, number: int, size: int) -> bool:
        """Other sessions of ``size`` tokens in all, then A; whether A still hit."""
        count = -(-size // self.evidence.plan.session_tokens)
        label = "" if number == 0 else f", round {number + 1}"
        for i in range(count):
            name = "B" if number == 0 else f"B{i + 1}{label}"
            await self.send(name, user(await self._session_text(size // count)))
        return await self._return_to_a(f"A after B{label}")

    async def _return_to_a(self, name: str) -> bool:
        """Send A and note the switch; whether it hit as the immediate resend did."""
        before = self._again.cached_tokens
        back, _ = await self.send(name, self._a, shared=self._again.prompt_tokens)
        self._file_switch("A", before, back)
        return bool(before) and (back.cached_tokens or 0) >= 0.9 * before

    def _file_switch(self, session: str, before: int | None, back: Reply) -> None:
        """Note what came between `_leave` and ``back``, and leave again."""
        tokens, fresh, sessions, requests = self._left_own
        taken_tokens, taken_sessions = self._taken
        foreign = foreign_requests = 0
        if self.evidence.server.metrics:
            foreign = _work(self._left, self._last) - (self._own_tokens - tokens)
            finished = self._last.since(self._left, "finished")
            foreign_requests = finished - (self._own_requests - requests)
        self.evidence.switches.append(
            Switch(
                session,
                back.name,
                back.prompt_tokens,
                taken_tokens - fresh,
                taken_sessions - sessions,
                max(0, foreign),
                max(0, foreign_requests),
                before,
                back.cached_tokens,
            )
        )
        self._leave()

    async def _branch(self) -> None:
        """Two branches off the middle of A, the second where the first left."""
        text, plan = self._a[0]["content"], self.evidence.plan
        head = text[: len(text) // 2]
        fresh = max(int(1.5 * self._unit()), plan.session_tokens // 8)
        if not self._affordable(2 * (plan.session_tokens // 2 + fresh), None, "branch"):
            return
        for name in ("branch off A", "branch off A again"):
            tail = await self._text(fresh)
            await self.send(
                name, user(head + " " + tail), shared=plan.session_tokens // 2
            )

    async def _system_prompt(self) -> None:
        """Two sessions with the same system prompt."""
        part = self._part("second session with the same system prompt", 2)
        if not part:
            return
        ask = max(int(1.5 * self._unit()), part // 4)
        system = await self._text(part - ask - self._overhead)
        for name in ("system prompt", "system prompt, second session"):
            question = {"role": "user", "content": await self._text(ask)}
            chat = [{"role": "system", "content": system}, question]
            await self.send(name, chat, shared=part - ask)

    async def _conversation(self) -> None:
        """Three turns of one chat; the template has to keep what it rendered."""
        part = self._part("growing conversation", 1)
        if not part:
            return
        chat = user(await self._text(part // 2 - self._overhead // 2))
        shared = 0
        for turn in (1, 2, 3):
            vllm = self.evidence.server.engine == "vllm"
            extra = {"return_token_ids": True} if vllm else {}
            reply, answer = await self.send(
                f"conversation, turn {turn}", chat, shared=shared, **extra
            )
            if turn == 1:
                first = list(chat), answer
            shared = reply.prompt_tokens
            reply_text = answer.text.strip() or "Yes."
            chat = [*chat, {"role": "assistant", "content": reply_text}]
            chat += user(await self._text(max(self._unit(), part // 8)))
            if turn == 1:
                await self._compare_history(*first, chat)

    async def _compare_history(
        self, old: Messages, answer: Answer, new: Messages
    ) -> None:
        if not self.evidence.server.tokenizer:
            return
        before, after = await self.api.tokenize(old), await self.api.tokenize(new)
        if before is None or after is None:
            return
        kept = common_prefix(before, after)
        template = Template(self._stable, len(before), kept)
        if kept == len(before) and answer.text.strip() and answer.token_ids:
            continued = after[kept : kept + len(answer.token_ids)]
            template.answer_kept = continued == answer.token_ids
        self.evidence.template = template

    async def _two_at_once(self) -> None:
        """Two new sessions sent together, then both again."""
        part = self._part("two sessions at once", 2)
        if not part:
            return
        pair = [user(await self._session_text(part)) for _ in range(2)]
        reply, _ = await self.send("two sessions at once", *pair)
        await self.send(
            "two sessions at once, again", *pair, shared=reply.prompt_tokens
        )

    async def _long_sessions(self) -> None:
        """Two sessions that may be too long for the pool to hold both."""
        plan = self.evidence.plan
        size = plan.long_tokens
        if not size or not self._affordable(3 * size, None, "two long sessions"):
            return
        one, other = [user(await self._session_text(size)) for _ in range(2)]
        first, _ = await self.send("long session C", one)
        self._leave()
        await self.send("long session D", other)
        back, _ = await self.send("C after D", one, shared=first.prompt_tokens)
        # C is not sent twice in a row: whatever ends at its last alignment counts.
        unit = self.evidence.alignment or hit_alignment(self.evidence.server)
        self._file_switch("C", (first.prompt_tokens - 1) // unit * unit, back)

    # -- sizes and time ----------------------------------------------------------

    def _unit(self) -> int:
        return hit_alignment(self.evidence.server)

    async def _text(self, tokens: int) -> str:
        """Random text of ``tokens`` tokens as seen inside a prompt."""

        async def count(text: str) -> int | None:
            if not self.evidence.server.tokenizer:
                return None
            rendered = await self.api.tokenize(user(text))
            return len(rendered) - self._overhead if rendered else None

        return await self._writer.text(max(1, tokens), count)

    async def _session_text(self, tokens: int) -> str:
        """Text whose rendered prompt has ``tokens`` tokens."""
        return await self._text(tokens - self._overhead)

    def _part(self, what: str, cost: int) -> int:
        """Prompt tokens for a smaller session as time allows, 0 for none."""
        plan = self.evidence.plan
        smallest = smallest_session(self.evidence.server, self._overhead)
        for size in (plan.part_tokens, smallest):
            last = size == smallest
            if self._affordable(cost * size, None, what if last else None):
                return size
        return 0

    def _affordable(self, tokens: int, until: float | None, what: str | None) -> bool:
        """Whether a prefill of ``tokens`` ends in time; else ``what`` was skipped."""
        until = until or self._deadline
        speed = self._tokens_per_second
        if time.monotonic() + (tokens / speed if speed else 0.0) <= until:
            return True
        if what:
            self.evidence.skipped.append(
                f"{what}: {tokens} tokens at {speed:.0f} tokens/s would have passed "
                "the "
                f"time limit of {self._time_limit:.0f} s (--time-limit)"
            )
        return False


def _work(before: Snapshot, after: Snapshot) -> int:
    """Prompt and output tokens that all clients' requests took."""
    return after.since(before, "prompt_tokens") + after.since(
        before, "generation_tokens"
    )


async def _all(coroutines) -> list[Answer]:
    """Await all; the first failure cancels the rest and is raised as it is."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
