# SPDX-License-Identifier: Apache-2.0
"""The doctor's words on a terminal, in a pipe, and as JSON."""

import textwrap

import msgspec
from rich import box
from rich.markup import escape
from rich.table import Table

from vllm_pr.doctor.evidence import Evidence, Plan, Server
from vllm_pr.doctor.verdicts import Finding, exit_status
from vllm_pr.outputs import Console

_STYLE = {"fault": "bold red", "unsure": "bold yellow", "note": "bold green"}
_WORD = {"fault": "FAULT", "unsure": "UNSURE", "note": "NOTE"}
_OUTCOME = {0: "healthy", 1: "fault found", 2: "could not measure"}
PIPE_WIDTH = 100


def console(stderr: bool = False) -> Console:
    """A console: colour and the terminal's width on one, plain text in a pipe."""
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made = Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)
    return made


def show_server(out: Console, server: Server) -> None:
    """Who answers, and what it says about its cache."""
    name = "vLLM" if server.engine == "vllm" else "not vLLM, or it hides it"
    facts = [f"{name} {server.version or ''}".strip()]
    if server.model:
        facts.append(f"model {server.model}")
    if server.max_model_len is not None:
        facts.append(f"context {server.max_model_len:,}")
    if server.metrics:
        tokens = server.capacity_tokens  # not told before 0.24.0
        facts += [
            f"pool {_count(server.blocks)} blocks"
            + (f" = {tokens:,} tokens" if tokens else ""),
            f"block {_count(server.block_size)}"
            + (f", hit alignment {server.alignment}" * bool(server.alignment)),
            f"interval {'not told' if server.interval is None else server.interval}",
        ]
    out.print(escape(f"{server.url}: " + " · ".join(facts)), soft_wrap=True)


def show_plan(out: Console, server: Server, plan: Plan, time_limit: float) -> None:
    """What will be sent at most, and what it can push out of the cache."""
    out.print(
        f"Sends at most {plan.bound_tokens:,} prompt tokens in {plan.bound_requests} "
        "requests of random text, one token of output each; starts none after "
        f"{time_limit:.0f} s.",
        soft_wrap=True,
    )
    if server.capacity_tokens:
        share = min(1.0, plan.bound_tokens / server.capacity_tokens)
        what = f"up to {share:.0%} of the cache"
    else:
        what = "cached prefixes"
    out.print(
        f"That can displace {what}; all of it where switching sessions flushes.",
        soft_wrap=True,
    )


def show(out: Console, evidence: Evidence, findings: list[Finding]) -> None:
    """Table of requests, then the findings and the outcome."""
    show_requests(out, evidence)
    for finding in findings:
        _show_finding(out, finding)
    status = exit_status(findings)
    out.print()
    style = {0: "bold green", 1: "bold red", 2: "bold yellow"}[status]
    names = _names(findings, status)
    then = ", notes" * (status == 0) + f": {names}"
    out.print(f"[{style}]{_OUTCOME[status]}[/]" + then * bool(names))


def show_requests(out: Console, evidence: Evidence) -> None:
    """Table of the requests that were answered."""
    if evidence.replies:
        out.print()
        out.print(_table(out, evidence))


def _names(findings: list[Finding], status: int) -> str:
    wanted = {0: "note", 1: "fault", 2: "unsure"}[status]
    names = (f.name for f in findings if f.severity == wanted)
    return ", ".join(name for name in names if name != "healthy")


def _table(out: Console, evidence: Evidence) -> Table:
    table = Table(box=box.SIMPLE_HEAD if out.is_terminal else None, pad_edge=False)
    table.add_column("request", no_wrap=True)
    for title in (
        "prompt",
        "shared",
        "cached",
        "hit %",
        "first token",
        "pool",
        "preempted",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for reply in evidence.replies:
        cached = reply.cached_tokens
        table.add_row(
            escape(reply.name),
            f"{reply.prompt_tokens:,}",
            f"{reply.shared_tokens:,}",
            "?" if cached is None else f"{cached:,}",
            "?" if cached is None else f"{100 * cached / reply.prompt_tokens:.1f}",
            f"{reply.ttft_s:.2f} s",
            "-" if reply.peak_usage is None else f"{reply.peak_usage:.0%}",
            str(reply.preemptions) if evidence.server.metrics else "?",
        )
    return table


def _show_finding(out: Console, finding: Finding) -> None:
    out.print()
    style = _STYLE[finding.severity]
    out.print(f"[{style}]{_WORD[finding.severity]}[/] [bold]{escape(finding.title)}[/]")
    _say(out, finding.text, "  ")
    for line in finding.evidence:
        _say(out, line, "  - ")
    for remedy in finding.remedy:
        out.print(f"  [cyan]->[/] [bold]{escape(remedy.run)}[/]", soft_wrap=True)
        _say(out, remedy.say, "     ")


def _say(out: Console, text: str, indent: str) -> None:
    """Text in the console's width, its lines below the first word of the first."""
    lines = textwrap.fill(
        text,
        max(40, out.width - 1),
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_on_hyphens=False,
    )
    out.print(escape(lines), soft_wrap=True)


def as_json(evidence: Evidence, findings: list[Finding]) -> bytes:
    """Everything that `show` prints, for machines."""
    status = exit_status(findings)
    content = {
        "exit_status": status,
        "outcome": _OUTCOME[status],
        "findings": findings,
        "evidence": evidence,
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"
