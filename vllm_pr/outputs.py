# SPDX-License-Identifier: Apache-2.0
"""What is written: results to files named by an option, words to a console."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import rich.console
import typer


class Console(rich.console.Console):
    """A console whose reader may go away: the exit status stays what it is."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        if not self.stderr:
            discard()


def flush() -> None:
    """Write what is left for standard output, if anybody still reads it.

    Raises:
        OSError: It cannot be written, as where the disk is full.
    """
    if sys.stdout:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
            return
        discard()


def discard() -> None:
    """Drop what is, or will be, written to standard output."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _file(path: Path) -> str | None:
    """Why a file cannot be written, None when it can; it is not touched."""
    if path.is_dir():
        return "it is a folder"
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    there = path if path.exists() else folder
    return None if os.access(there, os.W_OK) else "no permission"


def _folder(path: Path) -> str | None:
    """Why files cannot be written in a folder, which may not be there yet."""
    there = path.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        return f"{there} is not a folder"
    return None if os.access(there, os.W_OK) else "no permission"


def writable(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """Callback of an option for a file or, with metavar DIR, for a folder."""
    if value is None:
        return None
    try:
        reason = (_folder if param.metavar == "DIR" else _file)(value)
    except OSError as error:
        reason = error.strerror
    if reason:
        typer.echo(f"vllm-pr: cannot write {param.opts[0]} {value}: {reason}", err=True)
        raise typer.Exit(2)
    return value


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Also write JSON here.",
        readable=False,
        callback=writable,
    ),
]
