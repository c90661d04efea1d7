# SPDX-License-Identifier: Apache-2.0
"""``vllm-pr proof``: run the proof's tests and print the figures that they record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from vllm_pr.outputs import Console, JsonFile

TESTS = Path(__file__).resolve().parent / "tests"
PREFIX = "test_proof_"
FIGURES = "VLLM_PR_FIGURES"  # names the file that the tests write them to


def parts() -> list[str]:
    """What there is to prove: the names of the proof's test files."""
    return sorted(path.stem.removeprefix(PREFIX) for path in TESTS.glob(PREFIX + "*"))


def proof(
    part: Annotated[
        list[str] | None,
        typer.Argument(help=f"{', '.join(parts())}; all of them by default."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Run the tests that the proof rests on; print the figures that they record.

    Exit status 1 when a test fails, 2 when the installed vLLM is not stock. About 15
    minutes for all of them.
    """
    from vllm_pr.patching.trees import changed_tree

    console = Console(stderr=True, highlight=False)
    if unknown := set(part or ()) - set(parts()):
        console.print(
            f"vllm-pr: no such part: {', '.join(sorted(unknown))}; "
            f"there are {', '.join(parts())}"
        )
        raise typer.Exit(2)
    with console.status("making the changed copy of vLLM"):
        changed_tree()  # the tests run on it; raises when it cannot be made
    figures, failed = {}, []
    for name in part or parts():
        with tempfile.TemporaryDirectory(prefix="vllm-pr-") as folder:
            file = Path(folder) / "figures.json"
            argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            argv.append(str(TESTS / f"{PREFIX}{name}.py"))
            with console.status(f"{name}: one to five minutes"):
                done = subprocess.run(
                    argv,
                    env=dict(os.environ) | {FIGURES: str(file)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            if file.exists():
                figures |= json.loads(file.read_text(encoding="utf-8"))
        if json_file is not None:  # each time: a run that is cut short leaves some
            json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        lines = done.stdout.rstrip().splitlines()
        console.print(f"{name}: {lines[-1] if lines else 'no output'}")
        if done.returncode:
            failed.append(name)
            console.print("\n".join(lines[-40:-1]), markup=False)
    table = Table("figure", "value", box=None)
    for figure, value in figures.items():
        table.add_row(figure, as_text(value))
    Console(highlight=False).print(table)
    raise typer.Exit(1 if failed else 0)


def as_text(value: object) -> str:
    """A figure as a cell: a dictionary as its names and values."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
