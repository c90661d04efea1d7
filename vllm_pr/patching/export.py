# SPDX-License-Identifier: Apache-2.0
"""The change as ``git format-patch`` files that ``git am`` takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm_pr.patching import operations
from vllm_pr.patching.errors import PatchError
from vllm_pr.patching.plan import Change, make_plan
from vllm_pr.patching.rules import PARTS
from vllm_pr.patching.sources import Sources
from vllm_pr.patching.tree import Tree, git

_MESSAGES = Path(__file__).parent
_AUTHOR = ("Name of the submitter", "submitter@example.com")
_DATE = "1767225600"  # 2026-01-01, where the sources are in no git repository


@dataclass
class Export:
    """What was written.

    Attributes:
        files: The patches, in the order for ``git am``.
        edited: Upstream path of each edited file to lines added and removed.
        added: Upstream paths of the new files.
    """

    release: str
    files: list[str]
    edited: dict[str, tuple[int, int]] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def export(
    tree: Tree,
    out: Path,
    sources: Sources,
    stack: bool = False,
    force_release: str | None = None,
) -> Export:
    """Write the change for a tree as one patch, or one for each part.

    Args:
        tree: Stock, or with the change by ``apply``; nothing is changed in it.
        out: Folder, made when it is not there.
        stack: Two commits, the queue and the default, instead of one.

    Raises:
        PatchError: A rule does not fit, or ``out`` holds other patches.
    """
    release, read = operations.stock_of(tree, sources, force_release)
    plans = [
        make_plan(sources, release, read, tree.takes, PARTS[: index + 1])
        for index in range(len(PARTS))
    ]
    if plans[0] == plans[1]:
        commits = [("queue", plans[0])]
    elif stack:
        commits = list(zip(PARTS, plans, strict=True))
    else:
        commits = [("", plans[-1])]
    with tempfile.TemporaryDirectory(prefix="vllm-pr-") as folder:
        repository = _Repository(Path(folder), sources)
        repository.commit_base(plans[-1], tree)
        for part, changes in commits:
            repository.commit(changes, _message(part))
        patches = repository.format_patches()
        result = Export(release, _deliver(patches, out))
        _count(result, repository.run("diff", "--numstat", "base"), plans[-1])
    if stack and len(commits) == 1:
        result.notes.append(
            f"one patch for vLLM {release} also with --stack: its default needs no "
            "change, so that there is no second commit"
        )
    if any(b"\r\n" in change.after for change in plans[-1]):
        result.notes.append("there are files with CRLF line ends: use git am --keep-cr")
    return result


class _Repository:
    """A throw-away repository with the touched files; no user's settings count."""

    def __init__(self, folder: Path, sources: Sources) -> None:
        self.root = folder / "tree"
        self.patches = folder / "patches"
        self.root.mkdir()
        name, email = _author()
        date = f"@{_date(sources)} +0000"
        self.environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(folder),
            "LC_ALL": "C",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
        }
        for role in ("AUTHOR", "COMMITTER"):
            self.environment |= {
                f"GIT_{role}_NAME": name,
                f"GIT_{role}_EMAIL": email,
                f"GIT_{role}_DATE": date,
            }
        self.run("init", "--quiet", "--template=")
        self.run("config", "core.autocrlf", "false")

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(self.root), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise PatchError(f"git {arguments[0]} failed: {done.stderr.strip()}")
        return done.stdout

    def commit_base(self, changes: Sequence[Change], tree: Tree) -> None:
        for change in changes:
            if change.before is not None:
                mode = (tree.root / change.path).stat().st_mode & 0o777
                self._write(change.path, change.before)
                (self.root / change.path).chmod(mode)
        self._commit_all("base")
        self.run("tag", "base")

    def commit(self, changes: Sequence[Change], message: str) -> None:
        for change in changes:
            self._write(change.path, change.after)
        self._commit_all(message)

    def format_patches(self) -> list[Path]:
        self.run(
            "format-patch",
            "--quiet",
            "--zero-commit",
            "--full-index",
            "--no-renames",
            f"--signature=vllm-pr {version('vllm-pr')}",
            f"--output-directory={self.patches}",
            "base..",
        )
        return sorted(self.patches.iterdir())

    def _commit_all(self, message: str) -> None:
        self.run("add", "--all", "--force")
        self.run("commit", "--quiet", "--allow-empty", f"--message={message}")

    def _write(self, path: str, content: bytes) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def _author() -> tuple[str, str]:
    """The user that git knows, else a clear placeholder."""
    here = Path.cwd()
    name, email = git(here, "config", "user.name"), git(here, "config", "user.email")
    if name and email:
        return name.strip(), email.strip()
    return _AUTHOR


def _date(sources: Sources) -> str:
    """When the sources were last committed: the same for the same sources."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return given
    paths = [*sources.new_files, *(edit.source for edit in sources.edits)]
    found = git(sources.root, "log", "-1", "--format=%ct", "--", *paths)
    return (found or "").strip() or _DATE


def _message(part: str) -> str:
    name = f"message.{part}.md" if part else "message.md"
    return (_MESSAGES / name).read_text(encoding="utf-8")


def _deliver(patches: Sequence[Path], out: Path) -> list[str]:
    names = {patch.name for patch in patches}
    if out.exists() and not out.is_dir():
        raise PatchError(f"{out} is not a folder")
    others = sorted(p.name for p in out.glob("*.patch") if p.name not in names)
    if others:
        raise PatchError(
            f"{out} holds other patches ({', '.join(others)}): "
            "remove them or name another folder"
        )
    written = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for patch in patches:
            beside = out / f".{patch.name}.tmp"
            shutil.copyfile(patch, beside)
            os.replace(beside, out / patch.name)
            written.append(str(out / patch.name))
    except OSError as error:
        raise PatchError(f"cannot write {out}: {error.strerror}") from None
    return written


def _count(result: Export, numstat: str, changes: Sequence[Change]) -> None:
    new = {change.path for change in changes if change.before is None}
    for line in numstat.splitlines():
        added, removed, path = line.split("\t")
        if path in new:
            result.added.append(path)
        else:
            result.edited[path] = (int(added), int(removed))
