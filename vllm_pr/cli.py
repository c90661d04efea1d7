# SPDX-License-Identifier: Apache-2.0
"""The console script ``vllm-pr``."""

import typer

app = typer.Typer(no_args_is_help=True)


def main() -> None:
    app()
