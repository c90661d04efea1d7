# SPDX-License-Identifier: Apache-2.0
"""``vllm-pr serve``: a tiny model behind vLLM's own server, to try the doctor on."""

from collections.abc import Callable
from typing import Annotated

import typer
from rich.markup import escape
from rich.status import Status

from vllm_pr.demo import TOO_SMALL
from vllm_pr.engine import server
from vllm_pr.engine.models import MODELS
from vllm_pr.engine.processes import EngineError, last_error
from vllm_pr.engine.variants import VARIANTS
from vllm_pr.outputs import Console
from vllm_pr.patching.errors import PatchError


def serve(
    model: Annotated[
        str, typer.Option(help=f"Tiny model: {' or '.join(MODELS)}.")
    ] = "gemma3-tiny",
    variant: Annotated[
        str, typer.Option(help=f"Setting: {', '.join(VARIANTS)}.")
    ] = "stock-default",
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks of the pool; default: by model.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65_535, help="Port on the loopback interface.")
    ] = 8000,
) -> None:
    """Serve a tiny model, stock or changed, until Ctrl-C: to try the doctor on.

    It is vLLM's own OpenAI-compatible server, ready after half a minute. Exit status
    0 when stopped by Ctrl-C, 2 when it cannot start, or ends by itself.
    """
    console, progress = Console(), Console(stderr=True)
    try:
        with Status("starting", console=progress) as status:
            running = server.serve(
                model, variant, blocks=blocks, port=port, on_wait=_about(status)
            )
            with running as found:
                status.stop()
                _say(console, found, variant)
                found.process.wait()
                raise EngineError(
                    f"the server ended: {last_error(found.log)} (log: {found.log})"
                )
    except (ValueError, OSError, EngineError, PatchError) as error:
        reason = str(error)
        if TOO_SMALL in reason:
            reason = "the pool does not hold one request: give --blocks a larger number"
        progress.print(f"vllm-pr serve: {escape(reason)}", soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        progress.print("vllm-pr serve: stopped")


def _about(status: Status) -> Callable[[float, str], None]:
    return lambda waited, line: status.update(
        f"starting, {waited:.0f} s: {escape(line[:50])}"
    )


def _say(console: Console, running: server.Server, variant: str) -> None:
    for line in (
        f"{running.model}, {variant}, vLLM {running.release}: {running.url}",
        f"log: {running.log}",
        f"Ctrl-C stops it. In another terminal: vllm-pr doctor --url {running.url}",
    ):
        console.print(escape(line), highlight=False, soft_wrap=True)
