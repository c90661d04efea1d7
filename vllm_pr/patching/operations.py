# SPDX-License-Identifier: Apache-2.0
"""``apply``, ``status`` and ``revert`` of the change on one tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version as installed_version
from typing import Any

from packaging.version import Version

from vllm_pr.patching import journal
from vllm_pr.patching.errors import PatchError
from vllm_pr.patching.plan import Change, Unfit, make_plan, reader
from vllm_pr.patching.sources import Sources
from vllm_pr.patching.state import (
    APPLIED,
    EDITED,
    NOT_APPLIED,
    PARTLY,
    REINSTALLED,
    Status,
    edited_lines,
    inspect,
)
from vllm_pr.patching.support import resolve
from vllm_pr.patching.tree import Tree, detect_version, locally_modified


@dataclass
class Outcome:
    """What ``apply`` or ``revert`` did.

    Attributes:
        action: ``applied``, ``already applied``, ``updated`` (from newer sources),
            ``completed`` (after an interruption); ``reverted``, ``not applied`` or
            ``cleared`` (an interrupted apply had changed nothing yet).
        files: Upstream paths of the change.
    """

    tree: str
    action: str
    release: str | None
    files: list[str]
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def status(tree: Tree, sources: Sources) -> Status:
    """See what is there; changes nothing.

    Raises:
        PatchError: Another process is changing it.
    """
    with journal.locked(tree, shared=True):
        return inspect(tree, sources)


def apply(tree: Tree, sources: Sources, force_release: str | None = None) -> Outcome:
    """Put the change into a tree, all of it or nothing.

    Args:
        force_release: Take the rules of this release, whatever the tree says, and
            change also files with local edits.

    Raises:
        PatchError: Why not; nothing was changed.
    """
    with journal.locked(tree):
        found = inspect(tree, sources)
        _refuse_to_apply(found)
        release = _release_of(tree, found, force_release)
        is_same = found.is_current and found.release == release
        if found.state == APPLIED and (found.by == "other" or is_same):
            paths = sorted(found.files)
            return Outcome(found.tree, "already applied", found.release, paths)
        manifest = journal.load(tree)
        changes = _planned(tree, sources, release, manifest, found.version)
        there = {change.path: change.before is not None for change in changes}
        journal.check_places(tree, there)
        if manifest is None and force_release is None:
            _refuse_local_edits(tree, [path for path in there if there[path]], release)
        if journal.has_state(tree):
            journal.restore(tree, manifest)
        tool = f"vllm-pr {installed_version('vllm-pr')}"
        journal.change(
            tree,
            changes,
            journal.Manifest(tool, found.version, release, sources.fingerprint, []),
        )
        action = {APPLIED: "updated", PARTLY: "completed"}.get(found.state, "applied")
        return Outcome(found.tree, action, release, list(there))


def revert(tree: Tree, sources: Sources, discard_edits: bool = False) -> Outcome:
    """Take the change out again, to the byte.

    Args:
        discard_edits: Put back also the files that were edited after ``apply``.

    Raises:
        PatchError: Why not; nothing was changed.
    """
    with journal.locked(tree):
        found = inspect(tree, sources)
        manifest = journal.load(tree)
        if manifest is None:
            return _revert_without_manifest(tree, found)
        if found.state == EDITED and not discard_edits:
            raise PatchError(*edited_lines(found), "nothing was changed")
        there = {path: (tree.root / path).exists() for path in found.files}
        journal.check_places(tree, there)
        discard = found.state == EDITED
        journal.restore(tree, manifest, discard)
        paths = [
            path
            for path, state in found.files.items()
            if state == "changed" or (discard and state != "original")
        ]
        return Outcome(found.tree, "reverted", manifest.release, paths)


def stock_of(
    tree: Tree, sources: Sources, force_release: str | None = None
) -> tuple[str, Callable[[str], bytes | None]]:
    """The release of a tree, and how to read its files as they are in stock.

    Raises:
        PatchError: The tree is not supported, or the change came to it by other ways.
    """
    with journal.locked(tree, shared=True):
        found = inspect(tree, sources)
        _refuse_to_apply(found)
        if found.by == "other":
            raise PatchError(f"{found.tree} has the change already", *found.notes)
        release = _release_of(tree, found, force_release)
        return release, _stock_reader(tree, journal.load(tree))


def _revert_without_manifest(tree: Tree, found: Status) -> Outcome:
    if found.state != NOT_APPLIED:
        raise PatchError(f"{tree.root}: {found.state}", *found.notes)
    if not journal.has_state(tree):
        return Outcome(found.tree, "not applied", found.release, [], found.notes)
    journal.restore(tree, None)
    return Outcome(found.tree, "cleared", found.release, [], found.notes)


def _release_of(tree: Tree, found: Status, force_release: str | None) -> str:
    if found.version is None and force_release is None:
        detect_version(tree)  # raises, and says where it looked
    return resolve(found.version, force_release)


def _refuse_to_apply(found: Status) -> None:
    if found.state == EDITED:
        raise PatchError(*edited_lines(found), "nothing was changed")
    if found.state == REINSTALLED or (found.by == "other" and found.state == PARTLY):
        raise PatchError(f"{found.tree}: {found.state}", *found.notes)


def _refuse_local_edits(tree: Tree, paths: list[str], release: str) -> None:
    modified = locally_modified(tree, paths)
    if modified:
        raise PatchError(
            *(f"{path} was edited by hand since it was installed" for path in modified),
            f"undo (or commit) that, or apply over it with --force-release {release}",
        )


def _planned(
    tree: Tree,
    sources: Sources,
    release: str,
    manifest: journal.Manifest | None,
    version: str | None,
) -> list[Change]:
    """The changes; where they do not fit, what to do stands below the lines."""
    try:
        return make_plan(sources, release, _stock_reader(tree, manifest), tree.takes)
    except Unfit as error:
        if version and Version(version).public != release:
            advice = f"the rules for {release} do not fit vLLM {version}"
        else:
            advice = (
                f"put back what is named here as vLLM {release} has it "
                "(install vLLM again, or git checkout)"
            )
        raise PatchError(*error.lines, f"nothing was changed: {advice}") from None


def _stock_reader(
    tree: Tree, manifest: journal.Manifest | None
) -> Callable[[str], bytes | None]:
    """Read what a path holds without the change."""
    read = reader(tree.root)
    if manifest is None:
        return read
    ours = {entry.path for entry in manifest.entries}

    def read_stock(path: str) -> bytes | None:
        return journal.original(tree, manifest, path) if path in ours else read(path)

    return read_stock
