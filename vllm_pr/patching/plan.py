# SPDX-License-Identifier: Apache-2.0
"""What the change is for one tree, worked out in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_pr.patching import engine
from vllm_pr.patching.errors import PatchError
from vllm_pr.patching.rules import PARTS
from vllm_pr.patching.sources import Sources


class Unfit(PatchError):
    """Files that are not as the rules expect them, a line for each place."""


@dataclass(frozen=True)
class Change:
    """One file: upstream path, bytes before (None: new file) and after."""

    path: str
    before: bytes | None
    after: bytes


def make_plan(
    sources: Sources,
    release: str,
    read: Callable[[str], bytes | None],
    takes: Callable[[str], bool] = lambda path: True,
    parts: tuple[str, ...] = PARTS,
) -> list[Change]:
    """The changes that a release gets, in the order of their paths.

    Args:
        read: The untouched content at an upstream path, None where nothing is.
        takes: Whether a path is to be changed at all.
        parts: The commits of the pull request to include.

    Raises:
        Unfit: A line for each rule or file that does not fit.
        PatchError: There is nothing to change.
    """
    changes, lines = [], []
    for edits in sources.edits:
        rules = edits.select(release, parts)
        if not rules or not takes(edits.edits):
            continue
        before = read(edits.edits)
        if before is None:
            lines.append(
                f"{edits.source}: vLLM {release} here has no file {edits.edits}"
            )
            continue
        try:
            after = engine.rewrite(before, edits, rules, release)
        except PatchError as error:
            lines += error.lines
            continue
        changes.append(Change(edits.edits, before, after))
    for path, content in sources.selected_new_files(release, parts).items():
        if takes(path):
            if read(path) is not None:
                lines.append(
                    f"{path} is already there, but not as our new file: move it away"
                )
            changes.append(Change(path, None, content))
    if lines:
        raise Unfit(*lines)
    if not changes:
        raise PatchError(f"no rule is for vLLM {release}")
    return sorted(changes, key=lambda change: change.path)


def reader(root: Path) -> Callable[[str], bytes | None]:
    """Read upstream paths below a folder."""

    def read(path: str) -> bytes | None:
        file = root / path
        return file.read_bytes() if file.is_file() else None

    return read
