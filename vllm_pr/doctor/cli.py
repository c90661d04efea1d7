# SPDX-License-Identifier: Apache-2.0
"""``vllm-pr doctor``: the options; what they do is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_pr.outputs import JsonFile


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
            help="Most tokens of other sessions between a session and its return.",
        ),
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option(metavar="S", min=1, help="Start no request after S seconds."),
    ] = 270.0,
    timeout: Annotated[
        float,
        typer.Option(metavar="S", min=1, help="Give up a silent request after S."),
    ] = 600.0,
    ca_file: Annotated[
        Path | None,
        typer.Option(metavar="PEM", help="Certificate authorities to trust."),
    ] = None,
    json_file: JsonFile = None,
    prometheus: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Explain a saved /metrics text; no server."),
    ] = None,
    release: Annotated[
        str | None,
        typer.Option(
            metavar="X", help="With --prometheus: the vLLM release it is from."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Say why a server prefills again what it has seen, and what to do.

    Sends a bounded number of harmless requests to a running
    OpenAI-compatible vLLM server, having said how many.

    Exit status: 0 healthy, 1 a fault was found, 2 it could not be measured.
    """
    from vllm_pr.doctor.command import Options, run

    options = Options(
        url=url,
        model=model,
        api_key_env=api_key_env,
        prompt_tokens=prompt_tokens,
        switch_tokens=switch_tokens,
        time_limit=time_limit,
        timeout=timeout,
        ca_file=ca_file,
        json_file=json_file,
        prometheus=prometheus,
        release=release,
        yes=yes,
    )
    raise typer.Exit(run(options))
