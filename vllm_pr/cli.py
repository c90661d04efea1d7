# SPDX-License-Identifier: Apache-2.0
"""The console script ``vllm-pr``."""

import typer

from vllm_pr.patching import commands as patching
from vllm_pr.prove import prove

app = typer.Typer(no_args_is_help=True)
patching.register(app)
app.command()(prove)


@app.callback()
def _root() -> None:
    """Keep vLLM's prefix cache across session switches: apply, prove, measure."""


def main() -> None:
    app()
