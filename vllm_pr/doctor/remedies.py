# SPDX-License-Identifier: Apache-2.0
"""What to do about a finding on the release that runs, as commands.

What differs between releases comes from ``releases.toml``; the rest is the same on all.
"""

from dataclasses import dataclass

from vllm_pr.doctor.evidence import Server
from vllm_pr.releases import Release, known_releases, nearest_release

# Settings of the facts file that mean a checkpoint at every hit alignment.
DENSE = ("none", "dense")
ENV = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"


@dataclass
class Remedy:
    """Something to do.

    Attributes:
        run: The command.
        say: What it does, and what it costs.
    """

    run: str
    say: str


def release_of(server: Server) -> Release | None:
    """Facts about the release that runs, or about the newest known one before it.

    None when the server is not vLLM, does not tell, or is older than all known ones.
    """
    if server.engine != "vllm" or not server.version:
        return None
    return nearest_release(server.version)


def by_release(server: Server, fault: str) -> list[Remedy]:
    """Remedies from the facts file; those of the newest release when unknown."""
    release = release_of(server)
    force = f" --force-release {release.version}" if release else ""
    if release and _public(server) == release.version:
        force = ""
    entries = (release or known_releases()[-1]).remedies(fault)
    return [Remedy(e.run + force * e.change, e.say) for e in entries]


def _public(server: Server) -> str:
    """The server's version without a local part, such as ``+cpu``."""
    return (server.version or "").split("+")[0]


def dense_checkpoints(server: Server) -> bool | None:
    """Whether sliding-window layers keep a checkpoint at every hit alignment.

    None when neither the server nor the facts about its release tell.
    """
    if server.interval is not None:
        return server.interval == "None"
    release = release_of(server)
    return None if release is None else release.interval in DENSE


def interval_line(server: Server) -> str:
    """What is known about the server's retention interval."""
    running = f"vLLM {server.version or 'of an unknown release'}"
    if server.interval is not None:
        meaning = {
            "None": "checkpoints at every hit alignment",
            0: "only the end of a prompt and junctions seen before",
        }.get(server.interval, f"checkpoints every {server.interval} tokens")
        return f"{running}, retention interval {server.interval}: {meaning}"
    release = release_of(server)
    if release and release.interval_set_by == "environment":
        return (
            f"{running}: checkpoints at every hit alignment by default; whether {ENV} "
            "is "
            "set in the server's environment is not visible here"
        )
    if release and release.interval_set_by == "nothing":
        return f"{running} has no retention interval: every block is a checkpoint"
    return f"{running}: retention interval not told"


def release_lines(server: Server) -> list[str]:
    """What is known about the server's retention interval and about its release."""
    return [line for line in (interval_line(server), facts_line(server)) if line]


def facts_line(server: Server) -> str | None:
    """What the release is known to do as it ships."""
    release = release_of(server)
    if release is None:
        return None
    exact = release.version == _public(server)
    return (
        f"{'' if exact else 'the nearest known release, '}{release.version} as it "
        "ships: "
        f"session after a switch {release.session_switch.replace('-', ' ')}, first "
        f"branch {release.first_branch}, resend with EAGLE/MTP {release.eagle_resend}"
    )


def keep_sessions(server: Server) -> list[Remedy]:
    """Cure for a flush: the facts file's, and the first later release without it."""
    found = by_release(server, "session_switch")
    if server.interval == 0:
        found = [r for r in found if not r.run.endswith("interval 0")]
    running = release_of(server)
    if running is None or running.session_switch == "kept":
        return found
    kept = [
        r
        for r in known_releases()
        if r.session_switch == "kept" and r.eagle_resend == "kept"
    ]
    if not kept or any("pip install" in r.run for r in found):
        return found
    branch = "" if kept[0].first_branch == "kept" else ", but the first branch is lost"
    upgrade = f"Or upgrade: sessions survive a switch by default{branch}."
    return [*found, Remedy(f"pip install 'vllm>={kept[0].version}'", upgrade)]


def caching_on() -> list[Remedy]:
    """Switch prefix caching on."""
    return [
        Remedy(
            "vllm serve MODEL --enable-prefix-caching",
            "Without --no-enable-prefix-caching; a model for which vLLM switches "
            "caching "
            "off by itself says so in the server's log.",
        )
    ]


def usage_details(server: Server) -> list[Remedy]:
    """Have the server tell cached tokens per request."""
    if server.engine != "vllm":
        return []
    return [
        Remedy(
            "vllm serve MODEL --enable-prompt-tokens-details",
            "Then run the doctor again: cached tokens are exact, whoever else is "
            "there.",
        )
    ]


def resend(server: Server) -> list[Remedy]:
    """Cure for a missing immediate resend."""
    if server.spec_decode:
        return [
            *by_release(server, "eagle_resend"),
            Remedy(
                "vllm serve MODEL",
                "Without --speculative-config, to see whether that is it.",
            ),
        ]
    return [
        Remedy(
            "vllm serve MODEL --enable-log-requests",
            "Compare the two prompts in the server's log.",
        )
    ]


def share_first(server: Server, unit: int) -> list[Remedy]:
    """Make prompts hit that are too short for the alignment."""
    return [
        Remedy(
            f"{_command(server)} --prompt-tokens N",
            f"Put what requests share first, and make it longer than {unit} tokens; N "
            "is then the new length.",
        )
    ]


def stable_template() -> list[Remedy]:
    """Cure for a template that does not only append."""
    return [
        Remedy(
            "vllm serve MODEL --chat-template FILE",
            "With a template that only ever appends: no date, no count of messages, "
            "nothing removed from earlier turns.",
        )
    ]


def one_engine() -> list[Remedy]:
    """Keep a session on the engine that has it."""
    return [
        Remedy(
            "curl -H 'X-data-parallel-rank: N' ...",
            "With every request of a session, N fixed for that session.",
        )
    ]


def past_the_proxy() -> list[Remedy]:
    """Ask one server itself."""
    return [
        Remedy(
            "vllm-pr doctor --url http://SERVER:PORT",
            "One server itself, past the load balancer or proxy.",
        )
    ]


def more_room(factor: float) -> list[Remedy]:
    """Cure for a pool that is too small by ``factor``."""
    return [
        Remedy(
            "vllm serve MODEL --gpu-memory-utilization 0.95",
            f"Or more devices: {factor:.1f} times the KV memory holds both.",
        ),
        Remedy(
            "vllm serve MODEL --kv-cache-dtype fp8",
            "Halves the bytes per token of a 16-bit cache.",
        ),
        Remedy(
            "vllm serve MODEL --kv-offloading-size GIB",
            "Keeps what falls out of the pool in host memory.",
        ),
    ]


def lasting_checkpoints(server: Server) -> list[Remedy]:
    """Keep checkpoints although the pool is full."""
    release = release_of(server)
    more = Remedy(
        "vllm serve MODEL --gpu-memory-utilization 0.95",
        "More KV memory, or fewer bytes per token (--kv-cache-dtype fp8), leaves room "
        "for "
        "checkpoints.",
    )
    if release is None or release.interval_set_by == "nothing":
        return [more]
    option = "vllm serve MODEL --prefix-cache-retention-interval N"
    if release.interval_set_by == "environment":
        option = f"{ENV}=N vllm serve MODEL"
    return [
        more,
        Remedy(
            option, "A checkpoint every N tokens that is kept as long as a session."
        ),
    ]


def preempted() -> list[Remedy]:
    """Cure for preemption."""
    return [
        Remedy(
            "vllm serve MODEL --max-num-seqs N",
            "Fewer at once, so that all of them fit.",
        ),
        Remedy("vllm serve MODEL --gpu-memory-utilization 0.95", "More KV memory."),
    ]


def provoke(server: Server, tokens: int | None) -> list[Remedy]:
    """Put the session switch to the test."""
    if not tokens:
        return [
            Remedy(
                f"{_command(server)} --prompt-tokens N", "N as long as your sessions."
            )
        ]
    return [
        Remedy(
            f"{_command(server)} --switch-tokens {tokens} --time-limit 1800",
            "Enough of other sessions to turn the free list over.",
        )
    ]


def measure() -> list[Remedy]:
    """Ask a server instead of a file."""
    return [
        Remedy("vllm-pr doctor --url http://HOST:PORT", "Measures it on the server.")
    ]


def again(
    server: Server, option: str = "", say: str = "When the server is quiet."
) -> list[Remedy]:
    """Run once more."""
    return [Remedy(f"{_command(server)} {option}".rstrip(), say)]


def _command(server: Server) -> str:
    """The doctor's command for this server."""
    return f"vllm-pr doctor --url {server.url}"
