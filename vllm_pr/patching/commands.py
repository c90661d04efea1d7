# SPDX-License-Identifier: Apache-2.0
"""The commands ``apply``, ``status``, ``revert``, ``export`` and ``tree``.

Heavy imports are inside the functions: ``vllm-pr --help`` stays fast.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console


def tree(
    release: Annotated[
        str | None, typer.Option(help="A release (default: the installed vLLM).")
    ] = None,
    part: Annotated[str, typer.Option(help="all, or queue for commit 1 alone.")] = "all",
) -> None:
    """Print the folder with the changed copy of vLLM (made when it is not there).

    Put it first on PYTHONPATH to run changed; the installed vLLM stays stock.
    """
    from vllm_pr.patching.errors import PatchError
    from vllm_pr.patching.trees import changed_tree

    try:
        with Console(stderr=True).status("making the changed copy of vLLM"):
            folder = changed_tree(release, part)
    except PatchError as error:
        _refuse(error.lines)
    print(folder)


def _refuse(lines: tuple[str, ...]) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for line in lines:
        console.print(f"vllm-pr: {line}", markup=False)
    raise typer.Exit(2)


def register(app: typer.Typer) -> None:
    """Add the commands to the console script."""
    for command in (tree,):
        app.command()(command)
