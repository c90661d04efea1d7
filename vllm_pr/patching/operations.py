# SPDX-License-Identifier: Apache-2.0
"""``apply``, ``status`` and ``revert`` of the change on one tree."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version as installed_version
from typing import Any

from packaging.version import Version

from vllm_pr.patching import engine, journal
from vllm_pr.patching.errors import PatchError
from vllm_pr.patching.plan import Change, make_plan, reader
from vllm_pr.patching.sources import Sources
from vllm_pr.patching.support import resolve, supported_releases
from vllm_pr.patching.tree import Tree, detect_version, git

APPLIED, NOT_APPLIED, PARTLY, EDITED = "applied", "not applied", "partly", "edited"
REINSTALLED = "reinstalled"
EXIT_CODES = {APPLIED: 0, NOT_APPLIED: 1, PARTLY: 3, EDITED: 3, REINSTALLED: 3}


@dataclass
class Status:
    """What is there.

    Attributes:
        state: ``applied``, ``not applied``, ``partly`` (interrupted, or only some of
            it), ``edited`` (by hand, after apply) or ``reinstalled`` (another vLLM
            was put over a changed one).
        by: ``vllm-pr`` (there is a manifest), ``other`` (found by content) or None.
        version: What the tree says it is; None when it does not.
        release: Whose rules are in it, or would be; None when unsupported.
        files: Upstream path to ``changed``, ``original``, ``edited`` or ``missing``.
        notes: What else there is to know, and what to do, a sentence each.
        is_current: Applied from the sources as they are now.
    """

    tree: str
    state: str
    by: str | None = None
    version: str | None = None
    release: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_current: bool = True

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Outcome:
    """What ``apply`` or ``revert`` did: ``action`` in a word or two."""

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
        return _inspect(tree, sources)


def apply(tree: Tree, sources: Sources, force_release: str | None = None) -> Outcome:
    """Put the change into a tree, all of it or nothing.

    Args:
        force_release: Take the rules of this release, whatever the tree says.

    Raises:
        PatchError: Why not; nothing was changed.
    """
    with journal.locked(tree):
        found = _inspect(tree, sources)
        _refuse_to_apply(found)
        release = _release_of(tree, found, force_release)
        is_same = found.is_current and found.release == release
        if found.state == APPLIED and (found.by == "other" or is_same):
            paths = sorted(found.files)
            return Outcome(found.tree, "already applied", found.release, paths)
        manifest = journal.load(tree)
        changes = make_plan(sources, release, _stock_reader(tree, manifest), tree.takes)
        _check_places(tree, changes)
        if journal.has_state(tree):
            journal.restore(tree, manifest)
        journal.change(tree, changes, _manifest(sources, found.version, release))
        action = {APPLIED: "updated", PARTLY: "completed"}.get(found.state, "applied")
        paths = [change.path for change in changes]
        return Outcome(found.tree, action, release, paths)


def revert(tree: Tree, sources: Sources, discard_edits: bool = False) -> Outcome:
    """Take the change out again, to the byte.

    Args:
        discard_edits: Put back also the files that were edited after ``apply``.

    Raises:
        PatchError: Why not; nothing was changed.
    """
    with journal.locked(tree):
        found = _inspect(tree, sources)
        manifest = journal.load(tree)
        if manifest is None:
            if found.state != NOT_APPLIED:
                raise PatchError(f"{tree.root}: {found.state}", *found.notes)
            if journal.has_state(tree):
                journal.restore(tree, None)
                return Outcome(found.tree, "cleared", None, [], found.notes)
            return Outcome(found.tree, "not applied", None, [], found.notes)
        if found.state == EDITED and not discard_edits:
            raise PatchError(*_edited_lines(found), "nothing was changed")
        journal.check_places(tree, _paths_there(tree, manifest))
        journal.restore(tree, manifest, discard_edits and found.state == EDITED)
        paths = [
            path
            for path, state in found.files.items()
            if state == "changed" or (discard_edits and state != "original")
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
        found = _inspect(tree, sources)
        _refuse_to_apply(found)
        if found.by == "other":
            raise PatchError(f"{found.tree} has the change already", *found.notes)
        release = _release_of(tree, found, force_release)
        return release, _stock_reader(tree, journal.load(tree))


def _release_of(tree: Tree, found: Status, force_release: str | None) -> str:
    if found.version is None and force_release is None:
        detect_version(tree)  # raises, and says where it looked
    return resolve(found.version, force_release)


def _inspect(tree: Tree, sources: Sources) -> Status:
    manifest = journal.load(tree)
    version = None
    with suppress(PatchError):
        version = detect_version(tree)
    if manifest is None:
        return _inspect_content(tree, sources, version)
    files = {entry.path: journal.file_state(tree, entry) for entry in manifest.entries}
    found = Status(str(tree.root), "", "vllm-pr", version, manifest.release, files)
    found.is_current = manifest.fingerprint == sources.fingerprint
    found.state = _state_of(set(files.values()))
    if found.state != APPLIED and _base(version) != _base(manifest.version):
        found.state = REINSTALLED
        found.notes.append(
            f"vLLM {version} was put over vLLM {manifest.version} with the change: "
            "`revert` takes away what is left of it, then `apply` again"
        )
    elif found.state in (PARTLY, NOT_APPLIED):
        found.notes.append(
            "an apply or revert was interrupted: `apply` or `revert` completes"
        )
    elif found.state == EDITED:
        found.notes += _edited_lines(found)
    elif not found.is_current:
        found.notes.append(
            "the change is not that of today: `apply` brings it up to date"
        )
    return found


def _base(version: str | None) -> str | None:
    return Version(version).base_version if version else None


def _state_of(states: set[str]) -> str:
    if states & {"edited", "missing"}:
        return EDITED
    if states == {"changed"}:
        return APPLIED
    return NOT_APPLIED if states == {"original"} else PARTLY


def _inspect_content(tree: Tree, sources: Sources, version: str | None) -> Status:
    """Without a manifest: look for each rule's result and each new file."""
    found = Status(str(tree.root), NOT_APPLIED, None, version)
    try:
        found.release = resolve(version) if version else None
    except PatchError as error:
        found.notes += error.lines
    release = found.release or supported_releases()[-1]
    present = _present(tree, sources, release)
    found.files = _file_states(tree, sources, release, present)
    if any(present.values()):
        found.by = "other"
        found.release = release
        found.state = APPLIED if all(present.values()) else PARTLY
        found.notes = _how_to_take_out(tree, sources, found)
        if found.state == PARTLY:
            for text, wanted in (("there", True), ("not there", False)):
                names = [name for name, there in present.items() if there is wanted]
                found.notes.insert(not wanted, f"{text}: {', '.join(names)}")
    elif journal.has_state(tree):
        found.notes.append(
            "an apply was killed before it changed anything: `apply` goes on, "
            "`revert` clears it away"
        )
    return found


def _present(tree: Tree, sources: Sources, release: str) -> dict[str, bool]:
    """Rule id or path of a new file to whether it is there."""
    present: dict[str, bool] = {}
    read = reader(tree.root)
    for edits in sources.edits:
        rules = edits.select(release)
        content = read(edits.edits) if rules and tree.takes(edits.edits) else None
        if content is not None:
            there = engine.marks(content, edits, rules)
            present |= {rule.id: rule.id in there for rule in rules}
    for path, content in sources.selected_new_files(release).items():
        if tree.takes(path):
            present[path] = read(path) == content
    return present


def _file_states(
    tree: Tree, sources: Sources, release: str, present: dict[str, bool]
) -> dict[str, str]:
    files = {}
    for edits in sources.edits:
        there = [present[r.id] for r in edits.select(release) if r.id in present]
        if there:
            state = "changed" if all(there) else "edited" if any(there) else "original"
            files[edits.edits] = state
    for path in sources.selected_new_files(release):
        if path in present:
            other = "edited" if (tree.root / path).exists() else "original"
            files[path] = "changed" if present[path] else other
    return files


def _how_to_take_out(tree: Tree, sources: Sources, found: Status) -> list[str]:
    text = "it is there without a manifest of vllm-pr, which cannot take it out"
    new = [path for path in found.files if path in sources.new_files]
    log = ("log", "--format=%h %s")
    added = git(tree.root, *log, "--diff-filter=A", "--reverse", "--", *new)
    if added is None or not new:
        return [f"{text}: undo the patch as it was put in (`patch -R`)"]
    if not added:
        return [f"{text}: it is not committed, so `git apply -R` of the patch does"]
    first = added.split(" ", 1)[0]
    since = git(tree.root, *log, f"{first}~1..", "--", *found.files) or added
    commits = since.strip().splitlines()
    names = " ".join(line.split(" ", 1)[0] for line in commits)
    if len(commits) == 1:
        return [
            f"{text}: it came by git commit {since.strip()!r}: `git revert {names}`"
        ]
    subjects = "; ".join(commits)
    return [
        f"{text}: it came by git: `git revert {names}`",
        f"those are the commits on the same files since then: {subjects}",
    ]


def _refuse_to_apply(found: Status) -> None:
    if found.state == EDITED:
        raise PatchError(*_edited_lines(found), "nothing was changed")
    if found.state == REINSTALLED or (found.by == "other" and found.state == PARTLY):
        raise PatchError(f"{found.tree}: {found.state}", *found.notes)


def _edited_lines(found: Status) -> list[str]:
    lines = [
        f"{path} is {state} since the change was applied"
        for path, state in found.files.items()
        if state in ("edited", "missing")
    ]
    return [*lines, "undo that by hand, or `revert --discard-edits` drops it"]


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


def _check_places(tree: Tree, changes: list[Change]) -> None:
    paths = {change.path: change.before is not None for change in changes}
    journal.check_places(tree, paths)


def _paths_there(tree: Tree, manifest: journal.Manifest) -> dict[str, bool]:
    return {entry.path: (tree.root / entry.path).exists() for entry in manifest.entries}


def _manifest(sources: Sources, version: str | None, release: str) -> journal.Manifest:
    tool = f"vllm-pr {installed_version('vllm-pr')}"
    return journal.Manifest(tool, version, release, sources.fingerprint, [])
