# SPDX-License-Identifier: Apache-2.0
"""The console script ``vllm-pr``."""

import typer

from vllm_pr.patching import commands as patching

app = typer.Typer(no_args_is_help=True)
patching.register(app)


@app.callback()
def _root() -> None:
    """Keep vLLM's prefix cache across session switches: apply, prove, measure."""


def main() -> None:
    app()
