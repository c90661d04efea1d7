# SPDX-License-Identifier: Apache-2.0
"""``vllm-pr doctor``: the command."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.status import Status

from vllm_pr.doctor import report
from vllm_pr.doctor.client import Api
from vllm_pr.doctor.errors import DoctorError
from vllm_pr.doctor.evidence import Evidence
from vllm_pr.doctor.probes import Probes
from vllm_pr.doctor.verdicts import UNMEASURED, examine, exit_status

GONE_SECONDS = 10.0


def doctor(
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Server, as http://HOST:PORT.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="M", help="Model; default: the first served.")
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable that holds the key."),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Length of your sessions in tokens."),
    ] = None,
    switch_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Most tokens of other sessions between leaving a session and its return.",
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(metavar="S", min=1, help="Start no request after S seconds.")
    ] = 270.0,
    timeout: Annotated[
        float, typer.Option(metavar="S", min=1, help="Give up a silent request after S.")
    ] = 600.0,
    ca_file: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Certificate authorities to trust.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write JSON.")
    ] = None,
    prometheus: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Explain a saved /metrics text; no server."),
    ] = None,
    release: Annotated[
        str | None,
        typer.Option(metavar="X", help="With --prometheus: the vLLM release it is from."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Say whether, why and what to do when a server prefills again what it has seen.

    Sends a bounded number of harmless requests to a running OpenAI-compatible vLLM
    server, having said how many. Exit status: 0 healthy, 1 a fault was found, 2 it could
    not be measured.
    """
    try:
        if (url is None) == (prometheus is None):
            raise DoctorError("name a server with --url, or a file with --prometheus")
        if json_file:
            _check_writable(json_file)
        if prometheus:
            from vllm_pr.doctor.saved import explain_file

            status = explain_file(prometheus, release, json_file)
        else:
            api = Api(
                url,
                _key(api_key_env),
                ca_file=str(ca_file) if ca_file else None,
                timeout=timeout,
            )
            status = _examine_server(
                api, model, (prompt_tokens, switch_tokens), time_limit, json_file, yes
            )
    except DoctorError as error:
        report.console(stderr=True).print(f"doctor: {error}", markup=False, soft_wrap=True)
        status = UNMEASURED
    raise typer.Exit(status)


def _examine_server(
    api: Api,
    model: str | None,
    sizes: tuple[int | None, int | None],
    time_limit: float,
    json_file: Path | None,
    yes: bool,
) -> int:
    """Look, ask, probe, report; returns the exit status."""
    out, err = report.console(), report.console(stderr=True)
    status = err.status("looking at the server") if err.is_terminal else None
    probes = Probes(
        api,
        prompt_tokens=sizes[0],
        switch_tokens=sizes[1],
        time_limit=time_limit,
        progress=_progress(status),
    )
    try:
        with asyncio.Runner() as runner:
            try:
                runner.run(probes.look(model))
                _show_start(out, probes.evidence, time_limit)
                _confirm(yes)
                with status or _Nothing():
                    evidence = runner.run(probes.run())
            finally:
                runner.run(api.close())
    except KeyboardInterrupt:
        return _interrupted(err, api.url)
    findings = examine(evidence)
    report.show(out, evidence, findings)
    if evidence.stopped:
        err.print(f"doctor: {evidence.stopped}", markup=False, soft_wrap=True)
    if json_file:
        json_file.write_bytes(report.as_json(evidence, findings))
    return exit_status(findings)


class _Nothing:
    """A context that does nothing, where there is no terminal for a progress line."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...


def _progress(status: Status | None):
    """What probes call to say what they do: the progress line, or nothing in a pipe."""
    return (lambda line: status.update(line)) if status else (lambda line: None)


def _show_start(out: Console, evidence: Evidence, time_limit: float) -> None:
    report.show_server(out, evidence.server)
    report.show_plan(out, evidence.server, evidence.plan, time_limit)


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


def _check_writable(path: Path) -> None:
    """Raises:
    DoctorError: The result could not be written there.
    """
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise DoctorError(f"cannot write --json {path}: no such folder, or not writable")
