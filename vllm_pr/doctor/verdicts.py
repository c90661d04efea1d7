# SPDX-License-Identifier: Apache-2.0
"""From evidence to findings: pure functions, one for each known cause.

Each check takes the evidence of one run and returns a finding or None. None of them
asks the server anything, so each can be tried on recorded evidence.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from vllm_pr.doctor import remedies
from vllm_pr.doctor.evidence import EDITED, Evidence, Reply, Switch
from vllm_pr.doctor.remedies import Remedy

HEALTHY, FAULT, UNMEASURED = 0, 1, 2
# A hit below this share of what should hit counts as lost: a sliding-window model
# loses all or nothing, a full-attention model its tail first.
KEPT = 0.9
HALF = 0.5
# Requests that leave, at a new place, a prompt that was sent just before.
PARTIAL = (EDITED, "branch off A", "system prompt, second session")


@dataclass
class Finding:
    """One cause, found or suspected.

    Attributes:
        name: Short name, the same on every run.
        severity: ``"fault"``: it is so. ``"unsure"``: the doctor could not tell, and
            the run is no proof of health. ``"note"``: worth knowing, no fault.
        title: One line.
        text: What it means, in plain words.
        evidence: The figures it rests on.
        remedy: What to do, best first.
    """

    name: str
    severity: Literal["fault", "unsure", "note"]
    title: str
    text: str
    evidence: list[str] = field(default_factory=list)
    remedy: list[Remedy] = field(default_factory=list)


Check = Callable[[Evidence], Finding | None]


def examine(evidence: Evidence) -> list[Finding]:
    """All findings, faults first; healthy when there is nothing else than notes."""
    findings = [finding for check in CHECKS if (finding := check(evidence))]
    if all(f.severity == "note" for f in findings):
        findings.insert(0, unexplained(evidence) or _healthy(evidence))
    order = {"fault": 0, "unsure": 1, "note": 2}
    return sorted(findings, key=lambda f: order[f.severity])


def exit_status(findings: list[Finding]) -> int:
    """0 healthy, 1 a fault was found, 2 health could not be measured."""
    severities = {f.severity for f in findings}
    if "fault" in severities:
        return FAULT
    return UNMEASURED if "unsure" in severities else HEALTHY


# -- shared readings -------------------------------------------------------------


def hit(reply: Reply | None) -> str:
    """A reply in words."""
    if reply is None:
        return "not sent"
    cached = "unknown" if reply.cached_tokens is None else reply.cached_tokens
    return f"{reply.name}: {cached} of {reply.prompt_tokens} prompt tokens cached"


def expected(evidence: Evidence, reply: Reply) -> int:
    """Tokens that would hit if nothing had been dropped since they were sent."""
    unit = evidence.alignment or evidence.server.block_size or 1
    reusable = min(reply.shared_tokens, reply.prompt_tokens - 1)
    return max(0, reusable) // unit * unit


def prelude(evidence: Evidence) -> int:
    """Tokens that a prompt never sent before hits: what the template starts with."""
    first = evidence.reply("A")
    return (first.cached_tokens or 0) if first else 0


def found(evidence: Evidence, reply: Reply) -> bool:
    """Whether a reply hit at least half of what it should, beyond the prelude."""
    want = expected(evidence, reply)
    least = min(prelude(evidence), want)
    return (reply.cached_tokens or 0) - least >= HALF * (want - least)


def foreign_until(evidence: Evidence, name: str) -> int:
    """Tokens of other clients from the resend of A to the request called ``name``."""
    order = [reply.name for reply in evidence.replies]
    between = evidence.replies[order.index("A again") + 1 : order.index(name) + 1]
    return sum(reply.foreign_tokens for reply in between)


def resend_works(evidence: Evidence) -> bool:
    """Whether an immediate resend of A hits at all."""
    again = evidence.reply("A again")
    return bool(again) and (again.cached_tokens or 0) >= HALF * again.prompt_tokens


def comparable(switch: Switch) -> bool:
    """Whether the session was cached when it was left, and its return measured."""
    was = (switch.cached_before or 0) >= HALF * switch.session_tokens
    return was and switch.cached_after is not None


def lost(switch: Switch) -> bool:
    """Whether the session came back without what an immediate resend finds."""
    return comparable(switch) and switch.cached_after < KEPT * switch.cached_before


def total(switch: Switch) -> int:
    """Tokens of the session itself and of everything that ran in between."""
    return switch.session_tokens + switch.between_tokens + switch.foreign_tokens


def fits(evidence: Evidence, switch: Switch, foreign: bool = True) -> bool:
    """Whether the session and all in between certainly fit in the pool side by side.

    Args:
        evidence: The run.
        switch: The return to the session.
        foreign: Whether to count other clients' requests.
    """
    tokens = switch.session_tokens + switch.between_tokens
    sessions = 1 + switch.between_sessions
    if foreign:
        tokens += switch.foreign_tokens
        sessions += max(switch.foreign_requests, 2 * evidence.traffic.running)
    return bool(evidence.fits(tokens, sessions))


def flushed(evidence: Evidence) -> list[Switch]:
    """Returns that missed although everything fits in the pool side by side."""
    return [s for s in evidence.switches if lost(s) and fits(evidence, s)]


def after_sessions(evidence: Evidence) -> list[Switch]:
    """Returns after sessions, without those after the doctor's edits and branches.

    The latter may take more room than the sessions that the plan fits in the pool.
    """
    aside = ("A after edit", "A before B")
    return [s for s in evidence.switches if s.reply not in aside]


def survived(evidence: Evidence) -> int:
    """Most tokens of other sessions after which A still hit."""
    return max(
        (s.between_tokens for s in evidence.switches if comparable(s) and not lost(s)),
        default=0,
    )


def switch_proven(evidence: Evidence) -> bool:
    """Whether A survived enough for the session switch to be called healthy."""
    target = evidence.plan.target_tokens if evidence.plan else None
    return target is not None and survived(evidence) >= KEPT * target


def _pool(evidence: Evidence) -> str:
    server = evidence.server
    parts = []
    if server.blocks:
        parts.append(f"{server.blocks} blocks")
    if server.capacity_tokens:
        parts.append(f"{server.capacity_tokens} tokens of longest requests")
    if evidence.fits_tokens and evidence.fits_tokens == server.max_model_len:
        parts.append(f"at least one request of {server.max_model_len} tokens")
    return "pool: " + ", ".join(parts) if parts else "pool: size not known"


def _switch_line(switch: Switch) -> str:
    others = f" and {switch.foreign_tokens} of other clients" * bool(
        switch.foreign_tokens
    )
    return (
        f"{switch.session} ({switch.session_tokens} tokens) after "
        f"{switch.between_tokens} "
        f"tokens of other sessions{others}: {switch.cached_after} cached, "
        f"{switch.cached_before} before"
    )


# -- the causes --------------------------------------------------------------------


def caching_off(evidence: Evidence) -> Finding | None:
    """Prefix caching is switched off."""
    if evidence.server.caching is not False:
        return None
    return Finding(
        "caching-off",
        "fault",
        "Prefix caching is off",
        "The server computes every prompt from its first token, whatever it has seen.",
        ["vllm:cache_config_info says enable_prefix_caching=False"],
        remedies.caching_on(),
    )


def cached_unknown(evidence: Evidence) -> Finding | None:
    """Nothing says how many tokens came from the cache."""
    measured = [r for r in evidence.replies if r.cached_tokens is not None]
    if not evidence.replies or len(measured) == len(evidence.replies):
        return None
    return Finding(
        "cached-unknown",
        "unsure",
        f"Cached tokens are not known for {len(evidence.replies) - len(measured)} of "
        f"{len(evidence.replies)} requests",
        "The server's usage has no prompt_tokens_details, and its counters "
        + (
            "also count other clients' requests."
            if evidence.server.metrics
            else "cannot be read. Only the time to first token speaks: see the table."
        ),
        [_times(evidence)],
        remedies.usage_details(evidence.server),
    )


def _times(evidence: Evidence) -> str:
    """Times to first token of A: new, again, and on its last return."""
    turns = [r for r in evidence.replies if r.name == "A" or r.name.startswith("A a")]
    shown = {r.name: f"{r.name} {r.ttft_s:.2f} s" for r in [*turns[:2], *turns[-1:]]}
    return f"time to first token: {', '.join(shown.values()) or 'not measured'}"


def short_prompts(evidence: Evidence) -> Finding | None:
    """Prompts below the hit alignment never hit."""
    again, unit = evidence.reply("short prompt again"), evidence.alignment
    if not again or again.cached_tokens != 0 or not resend_works(evidence) or not unit:
        return None
    if again.prompt_tokens > unit + 1:
        return None
    where = "as configured" if evidence.server.alignment else "as the hits show"
    asked = evidence.plan is not None and evidence.plan.short_wanted
    return Finding(
        "short-prompts",
        "fault" if asked else "note",
        f"Prompts of up to {unit} tokens cannot hit",
        f"A hit ends at a multiple of {unit} tokens ({where}) and leaves at least one "
        f"token to compute. A prompt has to be longer than {unit} tokens to hit at "
        "all, "
        "and what follows the last multiple is computed again every time.",
        [hit(again), hit(evidence.reply("A again")), _alignment_line(evidence)],
        remedies.share_first(evidence.server, unit),
    )


def _alignment_line(evidence: Evidence) -> str:
    seen = sorted({r.cached_tokens for r in evidence.replies if r.cached_tokens})
    return (
        f"hit lengths seen: {', '.join(map(str, seen))}; the alignment appears to be "
        f"{evidence.alignment_seen}"
    )


def resend_misses(evidence: Evidence) -> Finding | None:
    """The very same prompt, sent again at once, does not hit."""
    again = evidence.reply("A again")
    if not again or again.cached_tokens is None or evidence.server.caching is False:
        return None
    want = again.prompt_tokens - 1
    if again.cached_tokens >= HALF * want or _explained(evidence):
        return None
    if again.foreign_tokens and _crowded_out(evidence, again):
        return None
    speculative = evidence.server.spec_decode
    cause = (
        "Speculative decoding is on: with EAGLE or MTP the last block of a prefix is "
        "given up, and some releases then keep none that a hit could end at."
        if speculative
        else "None of the causes that the doctor knows shows: look for a cache_salt, "
        "LoRA adapter or prompt_logprobs that differs, or a proxy that edits prompts."
    )
    return Finding(
        "resend-misses",
        "fault",
        "An immediate resend misses",
        "The same prompt was sent twice in a row, and the second was computed again. "
        + cause,
        [
            hit(again),
            f"speculative decoding: {'on' if speculative else 'not seen'}",
            *remedies.release_lines(evidence.server),
        ],
        remedies.resend(evidence.server),
    )


def _explained(evidence: Evidence) -> bool:
    """Whether another finding already says why an immediate resend missed."""
    template = evidence.template
    return routed(evidence) or (template is not None and not template.stable_in_time)


def routed(evidence: Evidence) -> bool:
    """Whether requests of session A went to different engines."""
    turns = [r for r in evidence.replies if r.name == "A" or r.name.startswith("A a")]
    homes = [r.engines for r in turns if len(r.engines) == 1]
    return evidence.server.engines > 1 and any(home != homes[0] for home in homes)


def routing(evidence: Evidence) -> Finding | None:
    """The session does not come back to the engine that has it cached."""
    if not routed(evidence):
        return None
    turns = [r for r in evidence.replies if r.name == "A" or r.name.startswith("A a")]
    return Finding(
        "routing",
        "fault",
        "Requests of one session go to different engines",
        f"{evidence.server.engines} engines stand behind this URL, each with a cache "
        "of "
        "its own. A session that lands on another engine starts from nothing there.",
        [f"{r.name}: engine {', '.join(r.engines)}, {hit(r)}" for r in turns],
        remedies.one_engine(),
    )


def restarted(evidence: Evidence) -> Finding | None:
    """The figures are not of one server."""
    if not evidence.traffic.restarted:
        return None
    return Finding(
        "restarted",
        "unsure",
        "The figures are not all from the same server process",
        "Its start time changed during the run: it was restarted, or a load balancer "
        "spreads requests over several servers, each with a cache of its own.",
        ["process_start_time_seconds changed"],
        remedies.past_the_proxy(),
    )


def template_unstable(evidence: Evidence) -> Finding | None:
    """The chat template does not render the history onto the same prefix."""
    template = evidence.template
    if template is None:
        return None
    if not template.stable_in_time:
        return _template_finding(
            "fault",
            "The chat template renders the same messages differently each time",
            "It puts something in the prompt that changes, a time for example: what "
            "follows can never hit.",
            "the same messages, rendered twice, gave different tokens",
        )
    unit = evidence.alignment or evidence.server.block_size or 1
    gone = template.previous_tokens - template.kept_tokens
    line = (
        f"turn 1 was {template.previous_tokens} tokens; turn 2 begins with the first "
        f"{template.kept_tokens} of them"
    )
    if gone > unit:
        return _template_finding(
            "fault",
            "The chat template is not prefix-stable",
            "A longer history is not rendered onto the tokens of the shorter one: from "
            f"token {template.kept_tokens} on everything is computed again each turn.",
            line,
        )
    if gone or template.answer_kept is False:
        return _template_finding(
            "note",
            "The chat template renders an answer differently from how it was generated",
            "Each turn computes the previous answer again, not what came before it.",
            line if gone else "turn 2 goes on with other tokens than were generated",
        )
    return None


def _template_finding(
    severity: Literal["fault", "note"], title: str, text: str, line: str
) -> Finding:
    return Finding(
        "template",
        severity,
        title,
        text,
        [line],
        remedies.stable_template(),
    )


def template_suspected(evidence: Evidence) -> Finding | None:
    """Without the tokenizer: turn 2 misses though a resend hits."""
    turn = evidence.reply("conversation, turn 2")
    if evidence.template or not turn or turn.cached_tokens is None:
        return None
    want = expected(evidence, turn)
    if not resend_works(evidence) or found(evidence, turn):
        return None
    return Finding(
        "template",
        "unsure",
        "A growing conversation misses",
        "A resend hits, but the next turn of a conversation does not. The chat "
        "template "
        "may not be prefix-stable; without /tokenize the doctor cannot see it.",
        [hit(turn), f"{want} tokens were to be expected"],
    )


def session_flush(evidence: Evidence) -> Finding | None:
    """Other sessions flush A although all fits: the fault that this change cures."""
    losses = flushed(evidence)
    if not losses:
        return None
    switch = min(losses, key=total)
    peak = max((r.peak_usage or 0.0 for r in evidence.replies), default=0.0)
    lines = [
        _switch_line(switch),
        _times(evidence),
        _room_line(evidence, switch),
        f"preemptions: {evidence.traffic.preemptions}",
        *remedies.release_lines(evidence.server),
    ]
    if peak:
        lines.append(f"largest share of the pool in use at any time: {peak:.0%}")
    return Finding(
        "session-flush",
        "fault",
        "Switching sessions flushes the cache although the pool has room",
        "A prefill of a sliding-window model takes and gives back far more blocks than "
        "it "
        "keeps. Those that come back carry hashes and push the other session's blocks "
        "to "
        "the head of the free list, where they are overwritten: at any pool usage.",
        lines,
        remedies.keep_sessions(evidence.server),
    )


def _room_line(evidence: Evidence, switch: Switch) -> str:
    """The arithmetic: what the sessions need and what the pool has."""
    tokens, server = total(switch), evidence.server
    windows = evidence.window_blocks
    if windows is None:
        return f"together {tokens} tokens; {_pool(evidence)}"
    kept = -(-tokens // server.block_size)
    return (
        f"together {tokens} tokens: {kept} blocks of {server.block_size} tokens are "
        "kept, "
        f"and a running request takes up to {windows:.0f} more for windows; "
        f"{_pool(evidence)}"
    )


def capacity(evidence: Evidence) -> Finding | None:
    """The pool is too small for two such sessions."""
    if evidence.server.engine != "vllm" or not resend_works(evidence):
        return None
    late = [
        s for s in after_sessions(evidence) if lost(s) and not fits(evidence, s, False)
    ]
    if not late or flushed(evidence):
        return None
    switch = max(late, key=lambda s: s.session_tokens + s.between_tokens)
    sure = switch_proven(evidence) and not switch.foreign_tokens
    room = evidence.fits_tokens
    own = switch.session_tokens + switch.between_tokens
    return Finding(
        "capacity",
        "fault" if sure else "unsure",
        "The pool is too small for these sessions side by side",
        f"{1 + switch.between_sessions} sessions of {own} tokens together came one "
        "after "
        "the other, and the first was gone when it came back. Two sessions of up to "
        f"{room // 2 if room else 'an unknown number of'} tokens fit."
        + (
            ""
            if sure
            else " Or it is the session switch, or other clients: that was "
            "not told apart."
        ),
        [_switch_line(switch), _room_line(evidence, switch)],
        remedies.more_room(own / room if room else 2.0),
    )


def crowded(evidence: Evidence) -> Finding | None:
    """A was lost, and what other clients sent may be why."""
    resend = evidence.reply("A again")
    if resend and resend.foreign_tokens and not resend_works(evidence):
        lines = [hit(resend)] if _crowded_out(evidence, resend) else []
    else:
        lines = [
            _switch_line(s)
            for s in evidence.switches
            if lost(s) and fits(evidence, s, foreign=False) and not fits(evidence, s)
        ]
    if not lines:
        return None
    return Finding(
        "crowded",
        "unsure",
        "A was lost, but other clients may have needed the room",
        "With what they sent and what they had running at once, the pool may have been "
        "too small.",
        [
            *lines,
            f"others: {evidence.traffic.tokens} tokens in all, up to "
            f"{evidence.traffic.running} requests at once",
            _pool(evidence),
        ],
        remedies.again(evidence.server),
    )


def _crowded_out(evidence: Evidence, reply: Reply) -> bool:
    """Whether other clients sent more than the pool has room for beside ``reply``."""
    room = evidence.fits_tokens
    return not room or reply.prompt_tokens + reply.foreign_tokens > room


def not_provoked(evidence: Evidence) -> Finding | None:
    """A survived, but too little came in between to prove anything."""
    server, plan = evidence.server, evidence.plan
    if not resend_works(evidence) or flushed(evidence):
        return None
    if any(map(lost, after_sessions(evidence))):
        return None
    if plan is None or server.engine != "vllm" or switch_proven(evidence):
        return None
    kept = survived(evidence)
    if not evidence.switches:
        return None
    need = plan.target_tokens
    lines = [
        f"A still hit after {kept} tokens of other sessions; {_pool(evidence)}",
        *remedies.release_lines(server),
    ]
    if need:
        lines.append(
            f"a pool of {server.capacity_tokens or 'this many'} tokens turns its free "
            f"list over within {need} tokens at the latest; {kept} is "
            f"{kept / need:.0%} "
            "of that"
        )
    return Finding(
        "not-provoked",
        "unsure",
        "The session switch was not put to the test",
        "A survived, but too few tokens of other sessions came in between to turn the "
        "free list over: a server with the fault would have answered the same.",
        lines,
        remedies.provoke(server, need),
    )


def sparse_retention(evidence: Evidence) -> Finding | None:
    """An edit, a first branch or a second session misses what was just sent."""
    misses = partial_misses(evidence)
    unstable = evidence.template is not None and not evidence.template.stable_in_time
    if not misses or unstable or dense_checkpoints(evidence):
        return None
    second = evidence.reply("branch off A again")
    learned = second and found(evidence, second)
    lines = [_missed(evidence, r) for r in misses]
    if second and any(r.name == "branch off A" for r in misses):
        lines.append(hit(second) + (": it learned the junction" if learned else ""))
    lines += remedies.release_lines(evidence.server)
    return Finding(
        "sparse-retention",
        "fault" if dense_checkpoints(evidence) is False else "unsure",
        "An edit, the first branch or the second session misses",
        "Only the end of a prompt and places that were asked for before are kept in "
        "sliding-window layers. Whoever leaves a cached prompt at a new place, a new "
        "session with the same system prompt or an edit, computes all of it again.",
        lines,
        remedies.by_release(evidence.server, "first_branch"),
    )


def partial_misses(evidence: Evidence, crowded: bool = False) -> list[Reply]:
    """Replies that missed although a prompt sent just before begins the same.

    Args:
        evidence: The run.
        crowded: Also where other clients' requests may have pushed it out meanwhile.
    """
    if not resend_works(evidence):
        return []
    room = evidence.fits_tokens
    missed = []
    for name in PARTIAL:
        reply = evidence.reply(name)
        if not reply or reply.cached_tokens is None or found(evidence, reply):
            continue
        others = foreign_until(evidence, name)
        if crowded or not room or reply.prompt_tokens + others <= room:
            missed.append(reply)
    return missed


def dense_checkpoints(evidence: Evidence) -> bool | None:
    """Whether a checkpoint is made at every hit alignment, None when not known.

    Where the server does not tell its interval, the edit of A's end does: with
    dense checkpoints it hits in a full pool as well, unless others took the room.
    """
    if evidence.server.interval is not None:
        return evidence.server.interval == "None"
    edited = evidence.reply(EDITED)
    if not edited or edited.cached_tokens is None or not resend_works(evidence):
        return None
    if expected(evidence, edited) <= prelude(evidence):
        return None
    if found(evidence, edited):
        return True
    return None if foreign_until(evidence, EDITED) else False


def full_pool(evidence: Evidence) -> Finding | None:
    """Dense checkpoints inside a prompt had to make room for whole sessions."""
    misses = partial_misses(evidence, crowded=True)
    if not misses or not dense_checkpoints(evidence) or flushed(evidence):
        return None
    edited = next((reply for reply in misses if reply.name == EDITED), None)
    odd = edited is not None and not foreign_until(evidence, EDITED)
    second = evidence.reply("branch off A again")
    learned = second is not None and found(evidence, second)
    return Finding(
        "full-pool",
        "unsure" if odd else "note",
        "The pool is full: a first branch computes again what it shares",
        "Checkpoints are made at every hit alignment, but no block is left that is "
        "empty, and whole sessions are kept before checkpoints inside them."
        + " A place that was asked for is kept like a session." * learned
        + " Yet the end of a prompt should have been there." * odd,
        [
            *(_missed(evidence, reply) for reply in misses),
            *([hit(second)] if second else []),
            _pool(evidence),
            remedies.interval_line(evidence.server),
        ],
        remedies.lasting_checkpoints(evidence.server),
    )


def _missed(evidence: Evidence, reply: Reply) -> str:
    return f"{hit(reply)}, {expected(evidence, reply)} could have been"


def preemption(evidence: Evidence) -> Finding | None:
    """Requests were thrown out of the pool while they ran."""
    traffic = evidence.traffic
    if not traffic.preemptions and not traffic.preemptions_before:
        return None
    now = traffic.preemptions > 0
    return Finding(
        "preemption",
        "fault" if now else "note",
        "Running requests are preempted"
        if now
        else "Running requests have been preempted before",
        "More requests run than the pool can hold: one is thrown out, its blocks are "
        "reused, and it is computed again later.",
        [
            f"preemptions during this run: {traffic.preemptions}, before it: "
            f"{traffic.preemptions_before}"
        ],
        remedies.preempted(),
    )


def other_traffic(evidence: Evidence) -> Finding | None:
    """Another client used the server meanwhile."""
    traffic = evidence.traffic
    if not traffic.seen:
        return None
    exact = all(r.cached_from == "usage" for r in evidence.replies)
    return Finding(
        "other-traffic",
        "note" if exact else "unsure",
        "Another client is using the server: figures are unsure",
        "Times, pool usage and preemptions include its requests, and what it sends "
        "also "
        "takes room in the cache."
        + (" Cached tokens are exact: the server tells them per request." * exact),
        [
            f"{traffic.requests} requests and {traffic.tokens} tokens of others; at "
            "most "
            f"{traffic.running} at once"
        ],
        remedies.again(evidence.server),
    )


def not_vllm(evidence: Evidence) -> Finding | None:
    """The server is not vLLM, or hides its metrics."""
    server = evidence.server
    if server.metrics:
        return None
    other = server.engine != "vllm"
    seen = ["time to first token"]
    if any(r.cached_tokens is not None for r in evidence.replies):
        seen.append("cached tokens (usage)")
    if server.tokenizer:
        seen.append("rendered prompts (/tokenize)")
    return Finding(
        "other-engine" if other else "no-metrics",
        "unsure",
        "This is not vLLM" if other else "vLLM's metrics cannot be read",
        "Without vLLM's metrics the doctor cannot see the pool's size and use, "
        "preemptions, other clients, or whether prefix caching is on.",
        [f"seen: {', '.join(seen)}", *_plain_hits(evidence)],
        [] if other else remedies.past_the_proxy(),
    )


def _plain_hits(evidence: Evidence) -> list[str]:
    replies = (evidence.reply(name) for name in ("A again", "A after B", *PARTIAL))
    return [hit(r) for r in replies if r and r.cached_tokens is not None]


def incomplete(evidence: Evidence) -> Finding | None:
    """The run ended early, or left something out."""
    left_out = [s for s in evidence.skipped if not s.startswith("two long sessions")]
    if not evidence.stopped and not left_out:
        return None
    return Finding(
        "incomplete",
        "unsure",
        "The run is not complete",
        evidence.stopped or "Not everything could be measured in time.",
        left_out,
        remedies.again(
            evidence.server, "--time-limit 900", "Or with smaller --prompt-tokens."
        )
        if left_out
        else [],
    )


def one_session_pool(evidence: Evidence) -> Finding | None:
    """Two sessions of the longest request do not fit side by side: arithmetic only."""
    server = evidence.server
    if not server.capacity_tokens or not server.max_model_len:
        return None
    if server.capacity_tokens >= 2 * server.max_model_len:
        return None
    if evidence.reply("C after D"):
        return None
    return Finding(
        "one-session-pool",
        "note",
        "The pool holds fewer than two requests of the longest length",
        f"{server.capacity_tokens} tokens, {server.max_model_len} for the longest "
        f"request: sessions above {server.capacity_tokens // 2} tokens may push each "
        "other out. That was not tried.",
        [_pool(evidence)],
        remedies.again(
            server, f"--prompt-tokens {int(0.9 * server.max_model_len)}", "Tries it."
        ),
    )


CHECKS: tuple[Check, ...] = (
    caching_off,
    cached_unknown,
    short_prompts,
    resend_misses,
    routing,
    restarted,
    template_unstable,
    template_suspected,
    session_flush,
    capacity,
    crowded,
    not_provoked,
    sparse_retention,
    full_pool,
    preemption,
    other_traffic,
    not_vllm,
    incomplete,
    one_session_pool,
)


MUST_HIT = (
    "A again",
    "A after B",
    *PARTIAL,
    "conversation, turn 2",
    "two sessions at once, again",
)


def unexplained(evidence: Evidence) -> Finding | None:
    """Something missed, or was not sent, and no check says why: no proof of health."""
    full = partial_misses(evidence, crowded=True) if full_pool(evidence) else []
    bad = []
    for name in MUST_HIT:
        reply = evidence.reply(name)
        if reply is None or reply.cached_tokens is None:
            bad.append(f"{name}: not measured")
        elif reply not in full and not found(evidence, reply):
            bad.append(_missed(evidence, reply))
    if not bad:
        return None
    return Finding(
        "unexplained",
        "unsure",
        "Something misses for a reason that the doctor does not know",
        "None of the known causes fits the figures.",
        bad,
    )


def _healthy(evidence: Evidence) -> Finding:
    branch = "" if full_pool(evidence) else "a first branch, a second session, "
    return Finding(
        "healthy",
        "note",
        "Healthy",
        f"A resend, an edit, a return after other sessions, {branch}a growing "
        "conversation and two sessions at once all find what can be found.",
        [_switch_line(s) for s in evidence.switches[-1:]],
    )
