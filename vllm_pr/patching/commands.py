# SPDX-License-Identifier: Apache-2.0
"""The commands ``apply``, ``status``, ``revert``, ``export`` and ``tree``.

Heavy imports are inside the functions: ``vllm-pr --help`` stays fast.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from vllm_pr.outputs import Console

if TYPE_CHECKING:
    from vllm_pr.patching.operations import Outcome
    from vllm_pr.patching.tree import Tree

TreeArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[TREE]",
        help="A source tree or a folder that contains vllm/ "
        "(default: the installed vLLM, of which only vllm/ is changed).",
    ),
]
PythonOption = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Without TREE: the Python whose vLLM is meant."),
]
ForceOption = Annotated[
    str | None,
    typer.Option(
        metavar="RELEASE",
        help="Take the rules of this release, whatever the tree says it is, and also "
        "where files have edits of your own.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON object.")
]


def apply(
    tree: TreeArgument = None,
    python: PythonOption = None,
    force_release: ForceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put the change into a vLLM: all of it or nothing.

    The files as they were are kept in vllm/.vllm-pr/, so that revert restores them to
    the byte. When it is already there, says so and does nothing. Killed half-way, a
    second apply completes. Revert before you install another vLLM over it.

    Exit status: 0 the change is in, 2 refused (nothing was changed).
    """
    from vllm_pr.patching import operations
    from vllm_pr.patching.sources import Sources

    with _refusals(as_json):
        outcome = operations.apply(_open(tree, python), Sources(), force_release)
        _report(outcome, as_json)


def status(
    tree: TreeArgument = None, python: PythonOption = None, as_json: JsonOption = False
) -> None:
    """Say whether the change is in a vLLM, and whether it came by apply or by git.

    Exit status: 0 applied, 1 not applied, 2 cannot tell (no vLLM there, bad rules),
    3 partly applied, edited by hand since, or vLLM installed anew over it.
    """
    from vllm_pr.patching import operations, state
    from vllm_pr.patching.sources import Sources

    with _refusals(as_json):
        found = operations.status(_open(tree, python), Sources())
    if as_json:
        _print_json(found.as_json())
    else:
        console = _console()
        release = f"vLLM {found.version or 'of unknown version'}"
        console.print(f"{escape(found.tree)} ({release}): [bold]{found.state}[/bold]")
        if found.state != state.NOT_APPLIED or found.by:
            for path, what in found.files.items():
                console.print(f"  {what:9}{path}", markup=False)
        for note in found.notes:
            console.print(note, markup=False)
    raise typer.Exit(state.EXIT_CODES[found.state])


def revert(
    tree: TreeArgument = None,
    python: PythonOption = None,
    discard_edits: Annotated[
        bool, typer.Option(help="Put back also the files edited after apply.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Take the change out again: every file as it was, to the byte.

    Exit status: 0 the change is not there (any more), 2 refused (nothing was changed).
    """
    from vllm_pr.patching import operations
    from vllm_pr.patching.sources import Sources

    with _refusals(as_json):
        outcome = operations.revert(_open(tree, python), Sources(), discard_edits)
        _report(outcome, as_json)


def export(
    tree: Annotated[
        Path,
        typer.Argument(metavar="TREE", help="A source tree, of which nothing changes."),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the patches.")
    ],
    stack: Annotated[
        bool, typer.Option(help="Two commits: the queue, then the default.")
    ] = False,
    force_release: ForceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the change for a source tree as a git format-patch file.

    git am takes it on a git repository made from that tree. Author is who git says you
    are; the sign-off is yours to add (git am --signoff).
    """
    from vllm_pr.patching.export import export as write_patches
    from vllm_pr.patching.sources import Sources

    with _refusals(as_json):
        made = write_patches(_open(tree, None), out, Sources(), stack, force_release)
    if as_json:
        _print_json(made.as_json())
        return
    console = _console()
    for file in made.files:
        console.print(file, markup=False)
    plus, minus = (sum(lines) for lines in zip(*made.edited.values(), strict=True))
    console.print(
        f"for vLLM {made.release}: +{plus} -{minus} lines in {len(made.edited)} "
        f"existing files, {len(made.added)} new"
    )
    for note in made.notes:
        console.print(note, markup=False)


def tree(
    release: Annotated[
        str | None, typer.Option(help="A release (default: the installed vLLM).")
    ] = None,
    part: Annotated[
        str,
        typer.Option(help="queue for commit 1 alone; all, or default, for both."),
    ] = "all",
) -> None:
    """Print the folder with the changed copy of vLLM (made when it is not there).

    Put it first on PYTHONPATH to run changed; the installed vLLM stays stock.
    """
    from vllm_pr.patching.trees import changed_tree

    with _refusals():
        with Console(stderr=True).status("making the changed copy of vLLM"):
            folder = changed_tree(release, part)
        print(folder)


def register(app: typer.Typer) -> None:
    """Add the commands to the console script."""
    for command in (apply, status, revert, export, tree):
        app.command()(command)


def _open(path: Path | None, python: str | None) -> Tree:
    from vllm_pr.patching.errors import PatchError
    from vllm_pr.patching.tree import installed_tree, open_tree

    if path is None:
        return installed_tree(python)
    if python is not None:
        raise PatchError("give either TREE or --python, not both")
    return open_tree(path)


def _report(outcome: Outcome, as_json: bool) -> None:
    if as_json:
        _print_json(outcome.as_json())
        return
    console = _console()
    release = f" (release {outcome.release})" if outcome.release else ""
    console.print(f"{escape(outcome.tree)}{release}: [bold]{outcome.action}[/bold]")
    if outcome.action != "already applied":
        for path in outcome.files:
            console.print(f"  {path}", markup=False)
    for note in outcome.notes:
        console.print(note, markup=False)


@contextmanager
def _refusals(as_json: bool = False) -> Iterator[None]:
    """A user's mistake is a line or more on standard error, and exit status 2."""
    from vllm_pr.patching.errors import PatchError

    try:
        yield
    except PatchError as error:
        lines: Any = error.lines
        if as_json:
            _print_json({"error": list(lines)})
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        for line in lines:
            console.print(f"vllm-pr: {line}", markup=False)
        raise typer.Exit(2) from None


def _print_json(found: object) -> None:
    _console().out(json.dumps(found, indent=1))


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)
