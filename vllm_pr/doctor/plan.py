# SPDX-License-Identifier: Apache-2.0
"""How much the doctor sends: decided from the server's words before any prompt."""

from vllm_pr.doctor.errors import DoctorError
from vllm_pr.doctor.evidence import Plan, Server

DEFAULT_SESSION = 8192
DEFAULT_PART = 4096
DEFAULT_SWITCH = 262_144
LONGEST_LONG = 32_768
# A pool that cannot keep two sessions of this share of the context is called too small.
LONG = 0.6
UNKNOWN_CONTEXT = 8192
UNKNOWN_ALIGNMENT = 256
# Shares of what certainly fits: of A, of a smaller session, and of all sessions up to
# A's return. They leave room for A, its branches and two sessions with one system
# prompt together, so that a miss among them is no question of capacity.
SESSION = 0.3
PART = 0.2
FULL = 0.9
# Other sessions worth this share of the pool: a list of two equal groups turns over
# at half of it, one of five at a tenth.
TARGET = 0.75
GROWTH = 4


def hit_alignment(server: Server) -> int:
    """Tokens between places where a hit can end, or a guess on the safe side."""
    return server.alignment or server.block_size or UNKNOWN_ALIGNMENT


def smallest_session(server: Server, overhead: int) -> int:
    """Prompt tokens below which branches and system prompts cannot be told apart."""
    return overhead + 4 * max(hit_alignment(server), 16)


def longest_prompt(server: Server) -> int:
    """Prompt tokens that fit the context beside one token of output and a margin."""
    context = server.max_model_len or UNKNOWN_CONTEXT
    margin = 8 if server.tokenizer else max(8, context // 20)
    return context - 1 - margin


def make_plan(
    server: Server,
    overhead: int,
    fits: int | None,
    prompt_tokens: int | None = None,
    switch_tokens: int | None = None,
) -> Plan:
    """Choose the sizes.

    Args:
        server: What the server says about itself.
        overhead: Tokens that its chat template adds to a message.
        fits: Tokens of sessions that certainly fit in its pool, None when not known.
        prompt_tokens: The length of the operator's sessions, None for a default.
        switch_tokens: Most tokens between A and its return, None for a default.

    Raises:
        DoctorError: The context is too short for any of it, or for ``prompt_tokens``.
    """
    longest, smallest = longest_prompt(server), smallest_session(server, overhead)
    _check(server, overhead, longest, smallest, prompt_tokens)
    wanted = prompt_tokens or DEFAULT_SESSION
    room = fits or 2 * longest
    session = max(smallest, min(wanted, int(SESSION * room), longest))
    target = _target(server, session)
    short = prompt_tokens is not None and prompt_tokens < smallest
    plan = Plan(
        session_tokens=session,
        part_tokens=max(smallest, min(session, DEFAULT_PART, int(PART * room))),
        short_tokens=prompt_tokens if short else overhead + 12,
        short_wanted=short,
        switch_tokens=_switch(session, fits, target, switch_tokens),
        target_tokens=target,
        long_tokens=_long(server, session, longest, fits, prompt_tokens),
        bound_tokens=0,
        bound_requests=0,
    )
    plan.bound_tokens, plan.bound_requests = _bound(server, plan, overhead)
    return plan


def rounds(plan: Plan) -> list[int]:
    """Tokens of other sessions in each round between A and its return.

    The first is one session, as in A, A, B, A; then they grow up to the plan's most.
    """
    sizes = [plan.session_tokens]
    while sizes[-1] < plan.switch_tokens:
        sizes.append(min(GROWTH * sizes[-1], plan.switch_tokens))
    return sizes


def _check(
    server: Server, overhead: int, longest: int, smallest: int, wanted: int | None
) -> None:
    if wanted and wanted > longest:
        raise DoctorError(
            f"--prompt-tokens {wanted} does not fit: the server takes {longest} tokens "
            f"of prompt at most (context {server.max_model_len})"
        )
    if wanted and wanted < overhead + 8:
        raise DoctorError(
            f"--prompt-tokens {wanted} is too small: the chat template alone takes "
            f"{overhead} tokens"
        )
    if longest < smallest:
        raise DoctorError(
            f"the context of {server.max_model_len} tokens is too short for the probe: "
            f"hits land every {hit_alignment(server)} tokens and the chat template "
            "takes "
            f"{overhead}, so it needs {smallest} tokens of prompt: raise "
            "--max-model-len"
        )


def _target(server: Server, session: int) -> int | None:
    """Tokens in between that prove health; None when the pool's size is not known."""
    if server.dense_group_only or server.interval == 0:
        return session
    capacity = server.capacity_tokens
    if not capacity and server.blocks and server.block_size:
        capacity = server.blocks * server.block_size
    return max(session, int(TARGET * capacity) - session) if capacity else None


def _switch(
    session: int, fits: int | None, target: int | None, wanted: int | None
) -> int:
    """Most tokens in between: enough to prove health, inside what fits, bounded."""
    room = int(FULL * fits) - session if fits else session
    most = min(wanted or DEFAULT_SWITCH, target or session, room)
    return max(session, most)


def _long(
    server: Server, session: int, longest: int, fits: int | None, wanted: int | None
) -> int:
    """Tokens of two sessions that may not fit side by side; 0 where they surely do."""
    if not fits or server.engine != "vllm":
        return 0
    size = wanted or min(int(LONG * longest), LONGEST_LONG)
    return size if size > session and 2 * size > fits else 0


def _bound(server: Server, plan: Plan, overhead: int) -> tuple[int, int]:
    """Most prompt tokens and requests of a whole run."""
    session, part = plan.session_tokens, plan.part_tokens
    sizes = rounds(plan)
    others = sum(-(-size // session) for size in sizes)
    tokens = (7 + len(sizes)) * session + sum(sizes) + 9 * part
    tokens += 2 * plan.short_tokens + 3 * plan.long_tokens
    requests = 7 + len(sizes) + others + 9 + 2 + (3 if plan.long_tokens else 0)
    if not server.tokenizer:
        tokens, requests = int(1.1 * tokens) + overhead + 256, requests + 1
    return tokens, requests
