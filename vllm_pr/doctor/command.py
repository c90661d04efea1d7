# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-pr doctor`` does: look, ask, probe, report."""

import asyncio
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import httpx
import typer
from packaging.version import InvalidVersion, Version
from rich.status import Status

from vllm_pr.doctor import report
from vllm_pr.doctor.client import Api
from vllm_pr.doctor.errors import DoctorError
from vllm_pr.doctor.probes import Probes
from vllm_pr.doctor.saved import explain_file
from vllm_pr.doctor.verdicts import UNMEASURED, examine, exit_status
from vllm_pr.outputs import Console

GONE_SECONDS = 10.0


@dataclass(frozen=True)
class Options:
    """The options of the command, see ``vllm_pr.doctor.cli``."""

    url: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    prompt_tokens: int | None = None
    switch_tokens: int | None = None
    time_limit: float = 270.0
    timeout: float = 600.0
    ca_file: Path | None = None
    json_file: Path | None = None
    prometheus: Path | None = None
    release: str | None = None
    yes: bool = False


def run(options: Options) -> int:
    """Do what the options ask and return the exit status.

    A user's mistake or a failing server is one line on standard error and status 2.
    """
    try:
        _check(options)
        if options.prometheus:
            return explain_file(options.prometheus, options.release, options.json_file)
        return _examine_server(options)
    except DoctorError as error:
        report.console(stderr=True).print(
            f"doctor: {error}", markup=False, soft_wrap=True
        )
        return UNMEASURED


def _check(options: Options) -> None:
    """Raises:
    DoctorError: Options that do not go together.
    """
    if options.url is None and options.prometheus is None:
        raise DoctorError("name a server with --url, or a file with --prometheus")
    if options.url is not None and options.prometheus is not None:
        raise DoctorError("give --url or --prometheus, not both")
    if options.release is None:
        return
    if options.url is not None:
        raise DoctorError("--release is for --prometheus: the server tells its own")
    try:
        Version(options.release)
    except InvalidVersion:
        raise DoctorError(f"--release {options.release!r} is no version") from None


def _examine_server(options: Options) -> int:
    out, err = report.console(), report.console(stderr=True)
    status = err.status("looking at the server") if err.is_terminal else None
    api = Api(
        options.url or "",
        _key(options.api_key_env),
        ca_file=str(options.ca_file) if options.ca_file else None,
        timeout=options.timeout,
    )
    probes = Probes(
        api,
        prompt_tokens=options.prompt_tokens,
        switch_tokens=options.switch_tokens,
        time_limit=options.time_limit,
        progress=_progress(status),
    )
    try:
        _probe(probes, api, options, out, status)
    except KeyboardInterrupt:
        report.show_requests(out, probes.evidence)
        return _interrupted(err, api.url)
    evidence = probes.evidence
    findings = examine(evidence)
    report.show(out, evidence, findings)
    if evidence.stopped:
        err.print(f"doctor: {evidence.stopped}", markup=False, soft_wrap=True)
    if options.json_file:
        options.json_file.write_bytes(report.as_json(evidence, findings))
    return exit_status(findings)


def _probe(
    probes: Probes, api: Api, options: Options, out: Console, status: Status | None
) -> None:
    """Look at the server, ask the user, send the probes; close every connection."""
    with asyncio.Runner() as runner:
        try:
            runner.run(probes.look(options.model))
            server, plan = probes.evidence.server, probes.evidence.plan
            report.show_server(out, server)
            report.show_plan(out, server, plan, options.time_limit)
            _confirm(options.yes)
            with status or nullcontext():
                runner.run(probes.run())
        finally:
            runner.run(api.close())


def _progress(status: Status | None):
    """What probes call to say what they do: the progress line, or nothing in a pipe."""
    return (lambda line: status.update(line)) if status else (lambda line: None)


def _confirm(yes: bool) -> None:
    """Ask before the first prompt is sent.

    Raises:
        DoctorError: The answer is no, or nobody is there to answer.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise DoctorError("nothing was sent: no terminal to ask on; add --yes")
    try:
        agreed = typer.confirm("Go on?", default=True)
    except typer.Abort:
        agreed = False
    if not agreed:
        raise DoctorError("nothing was sent")


def _interrupted(err: Console, url: str) -> int:
    """After Ctrl-C: see that the server has dropped what was running."""
    from vllm_pr.doctor.metrics import Snapshot, parse

    until, active = time.monotonic() + GONE_SECONDS, None
    with httpx.Client(timeout=2.0) as client:
        while active != 0 and time.monotonic() < until:
            try:
                seen = parse(client.get(f"{url}/metrics").text)
            except (httpx.HTTPError, ValueError):
                seen = Snapshot()
            if not seen.vllm:
                break
            active = int(seen.total["running"] + seen.total["waiting"])
            time.sleep(0.1 if active else 0.0)
    after = {
        None: "the connection is closed",
        0: "the server has no request left running",
    }.get(active, f"the connection is closed; {active} requests of others are running")
    err.print(f"doctor: interrupted; {after}", markup=False, soft_wrap=True)
    return UNMEASURED


def _key(name: str | None) -> str | None:
    """The key in the environment variable ``name``; it stands in no message.

    Raises:
        DoctorError: The variable is not set, or holds what cannot be a key.
    """
    if name is None:
        return None
    key = os.environ.get(name, "")
    if not key:
        raise DoctorError(f"the environment variable {name} is not set or empty")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise DoctorError(f"the content of {name} is no key: spaces or odd characters")
    return key
