# SPDX-License-Identifier: Apache-2.0
"""Options that name what is written: found unfit before anything has run."""

import os
from pathlib import Path
from typing import Annotated

import typer


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
