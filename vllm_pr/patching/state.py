# SPDX-License-Identifier: Apache-2.0
"""What there is of the change in a tree, with a manifest or without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from packaging.version import Version

from vllm_pr.patching import engine, journal
from vllm_pr.patching.errors import PatchError
from vllm_pr.patching.plan import reader
from vllm_pr.patching.rules import PARTS
from vllm_pr.patching.sources import Sources
from vllm_pr.patching.support import resolve, supported_releases
from vllm_pr.patching.tree import Tree, detect_version, git, git_file

APPLIED, NOT_APPLIED, PARTLY, EDITED = "applied", "not applied", "partly", "edited"
REINSTALLED = "reinstalled"
_LOG = ("log", "--format=%h %s")
_SECOND = ": it is the second patch of `export --stack`, and `git am` of that completes"
_SHOWN = 5  # commits of others, by their subjects
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
        files: Upstream path to ``changed``, ``original``, ``edited``, ``missing`` or
            (found by content) ``partly``.
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


def inspect(tree: Tree, sources: Sources) -> Status:
    """See what is there; the caller holds the tree's lock."""
    manifest = journal.load(tree)
    version = None
    with suppress(PatchError):
        version = detect_version(tree)
    if manifest is None:
        return _inspect_content(tree, sources, version)
    return _inspect_manifest(tree, sources, version, manifest)


def edited_lines(found: Status) -> list[str]:
    """Which files were edited after apply, and what to do."""
    lines = [
        f"{path} is {state} since the change was applied"
        for path, state in found.files.items()
        if state in ("edited", "missing")
    ]
    return [*lines, "undo that by hand, or `revert --discard-edits` drops it"]


def _inspect_manifest(
    tree: Tree, sources: Sources, version: str | None, manifest: journal.Manifest
) -> Status:
    files = {entry.path: journal.file_state(tree, entry) for entry in manifest.entries}
    state = _state_of(set(files.values()))
    if state == APPLIED and journal.is_unfinished(tree):
        state = PARTLY
    elif state != APPLIED and _base(version) != _base(manifest.version):
        state = REINSTALLED
    found = Status(str(tree.root), state, "vllm-pr", version, manifest.release, files)
    found.is_current = manifest.fingerprint == sources.fingerprint
    if state == REINSTALLED:
        found.notes.append(
            f"vLLM {version} was put over vLLM {manifest.version} with the change: "
            "`revert` takes away what is left of it, then `apply` again"
        )
    elif state == EDITED:
        found.notes += edited_lines(found)
    elif state != APPLIED:
        found.notes.append(
            "an apply or revert was interrupted: `apply` or `revert` completes"
        )
    elif not found.is_current:
        found.notes.append(
            "the change has a newer form than this: `apply` brings it up to date"
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
    present = _present(tree, sources, release, reader(tree.root))
    found.files = _file_states(tree, sources, release, present)
    if _signs(present, sources):
        found.by = "other"
        found.release = release
        found.state = APPLIED if all(present.values()) else PARTLY
        found.notes = _how_to_take_out(tree, sources, found, present)
        if found.state == PARTLY:
            found.notes = _what_is_missing(sources, release, present) + found.notes
    elif journal.has_state(tree):
        found.notes.append(
            "an apply was killed before it changed anything: `apply` goes on, "
            "`revert` clears it away"
        )
    return found


def _present(
    tree: Tree, sources: Sources, release: str, read: Callable[[str], bytes | None]
) -> dict[str, bool]:
    """Rule id or path of a new file to whether it is there."""
    present: dict[str, bool] = {}
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


def _signs(present: dict[str, bool], sources: Sources) -> set[str]:
    """What is there; that something is missing is no sign of the change alone."""
    rules = [rule for edits in sources.edits for rule in edits.rules]
    deletions = {rule.id for rule in rules if not rule.text.strip()}
    return {name for name, there in present.items() if there} - deletions


def _file_states(
    tree: Tree, sources: Sources, release: str, present: dict[str, bool]
) -> dict[str, str]:
    files = {}
    for edits in sources.edits:
        there = [present[r.id] for r in edits.select(release) if r.id in present]
        if there:
            state = "changed" if all(there) else "partly" if any(there) else "original"
            files[edits.edits] = state
    for path in sources.selected_new_files(release):
        if path in present:
            other = "edited" if (tree.root / path).exists() else "original"
            files[path] = "changed" if present[path] else other
    return files


def _what_is_missing(
    sources: Sources, release: str, present: dict[str, bool]
) -> list[str]:
    """Whole parts by their name, else every rule and new file."""
    parts = {r.id: r.part for edits in sources.edits for r in edits.select(release)}
    parts |= {path: new.part for path, new in sources.new_files.items()}
    notes: list[str] = []
    for part in PARTS:
        names = {name: there for name, there in present.items() if parts[name] == part}
        missing = [name for name, there in names.items() if not there]
        if not missing:
            notes.append(f"part {part} is there")
        elif len(missing) == len(names):
            second = part == PARTS[1] and notes == [f"part {PARTS[0]} is there"]
            notes.append(f"part {part} is not there{_SECOND if second else ''}")
        else:
            there = ", ".join(name for name in names if name not in missing)
            lacking = ", ".join(missing)
            notes.append(f"of part {part} there is {there}, but not {lacking}")
    return notes


def _how_to_take_out(
    tree: Tree, sources: Sources, found: Status, present: dict[str, bool]
) -> list[str]:
    text = "it is there without a manifest of vllm-pr, which cannot take it out"
    new = [path for path in found.files if path in sources.new_files]
    added = git(tree.root, *_LOG, "--diff-filter=A", "--name-only", "--", *new)
    if added is None or not new:
        return [f"{text}: undo the patch as it was put in (`patch -R`)"]
    if not added:
        how = "it is not committed, `git apply -R` with the patch takes it out"
        return [f"{text}: {how}"]
    first = _first_commit(added)
    since = git(tree.root, *_LOG, f"{first}~1..", "--", *found.files)
    if since is None:  # the first commit of all
        since = git(tree.root, *_LOG, "--", *found.files) or ""
    commits = dict(line.split(" ", 1) for line in since.splitlines())
    own = _own_commits(tree, sources, found, _signs(present, sources), [*commits][::-1])
    names = " ".join(name for name in commits if name in own)
    notes = [f"{text}: it came by git, and `git revert {names or first}` takes it out"]
    later = [f"{name} {about}" for name, about in commits.items() if name not in own]
    if later:
        more = [f"{len(later) - _SHOWN} more"] if len(later) > _SHOWN else []
        notes.append(
            "(later commits on the same files, which are no part of it, may conflict "
            f"with that: {'; '.join(later[:_SHOWN] + more)})"
        )
    return notes


def _first_commit(added: str) -> str:
    """The earliest of the commits that last added each path, newest first."""
    first, commit, seen = "", "", set()
    for line in added.splitlines():
        if " " in line:
            commit = line.split(" ", 1)[0]
        elif line and line not in seen:
            seen.add(line)
            first = commit
    return first


def _own_commits(
    tree: Tree, sources: Sources, found: Status, signs: set[str], commits: list[str]
) -> set[str]:
    """The commits, oldest first, that brought something of what is there now."""

    def signs_in(commit: str) -> set[str]:
        read = partial(git_file, tree.root, commit)
        return _signs(_present(tree, sources, found.release, read), sources) & signs

    own = set()
    before = signs_in(f"{commits[0]}~1") if commits else set()
    for commit in commits:
        if before >= signs:
            break
        there = signs_in(commit)
        if there - before:
            own.add(commit)
        before = there
    return own
