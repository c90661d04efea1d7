# SPDX-License-Identifier: Apache-2.0
"""``vllm-pr newest``: does the change still go onto the newest vLLM that pip finds?"""

from __future__ import annotations

import re
import subprocess
import sys

import typer

from vllm_pr.releases import (
    SOURCE_DISTRIBUTION,
    ReleaseError,
    known_releases,
    sdist_tree,
)


def newest_version() -> str:
    """The newest version of vLLM that pip finds.

    Raises:
        ReleaseError: pip finds none.
    """
    pip = [sys.executable, "-m", "pip", "index", "versions", SOURCE_DISTRIBUTION]
    done = subprocess.run(pip, capture_output=True, text=True)
    found = re.match(rf"{SOURCE_DISTRIBUTION} \(([^)]+)\)", done.stdout)
    if found is None:
        last = (done.stderr.strip() or "no answer").splitlines()[-1]
        raise ReleaseError(f"pip finds no {SOURCE_DISTRIBUTION}: {last}")
    return found[1]


def newest() -> None:
    """Try the newest rules on the newest vLLM that pip finds.

    Exit status: 0 they go onto it, 1 the rules that do not are named, 2 it could not be
    fetched.
    """
    from vllm_pr.patching.errors import PatchError
    from vllm_pr.patching.plan import make_plan, reader
    from vllm_pr.patching.sources import Sources

    rules = known_releases()[-1].version
    try:
        version = newest_version()
        tree = sdist_tree(version, known=False)
    except ReleaseError as error:
        typer.echo(f"vllm-pr: {error}", err=True)
        raise typer.Exit(2) from None
    try:
        changes = make_plan(Sources(), rules, reader(tree))
    except PatchError as error:
        typer.echo(f"vLLM {version}: the rules for {rules} do not go onto it:")
        for line in error.lines:
            typer.echo(f"  {line}")
        raise typer.Exit(1) from None
    typer.echo(
        f"vLLM {version}: the rules for {rules} go onto it ({len(changes)} files)"
    )
