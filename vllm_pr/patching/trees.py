# SPDX-License-Identifier: Apache-2.0
"""The *changed* copy of a package, to be put first on ``PYTHONPATH``."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_pr.patching.errors import PatchError
from vllm_pr.patching.plan import Change, make_plan, reader
from vllm_pr.patching.rules import PARTS
from vllm_pr.patching.sources import ROOT, Sources
from vllm_pr.patching.support import resolve, supported
from vllm_pr.patching.tree import Tree, detect_version, installed_tree, open_tree

BUILD = ROOT / "build" / "changed"
_KEPT = 3  # running processes may still import from the tree before the newest


def changed_tree(release: str | None = None, part: str = "all") -> Path:
    """The folder with a changed copy of vLLM, made once and kept under ``build/``.

    It is made anew when the sources of the change or the package change; a folder,
    once returned, is never changed.

    Args:
        release: ``None`` for the installed package, or a release whose stock tree
            ``vllm_pr.releases`` can fetch.
        part: ``queue`` for the first commit of the pull request alone; ``all``, or
            ``default``, for both.

    Returns:
        Folder with ``vllm/``: put it first on ``PYTHONPATH``.

    Raises:
        PatchError: No such package, it is not stock, or a rule does not fit it.
    """
    parts = parts_of(part)
    if release is not None:
        release = supported(release)
    stock = _stock(release)
    if (stock.package / ".vllm-pr").exists():
        raise PatchError(f"{stock.root} is not stock: run vllm-pr revert on it first")
    found = resolve(detect_version(stock), release)
    sources = Sources()
    key = hashlib.sha256(
        "\n".join(
            [_engine(), sources.fingerprint, part, str(stock.root), *_listing(stock)]
        ).encode()
    ).hexdigest()[:12]
    target = BUILD / f"{found}-{part}-{key}"
    if not target.is_dir():
        changes = make_plan(
            sources, found, reader(stock.root), lambda p: p.startswith("vllm/"), parts
        )
        with _locked():
            if not target.is_dir():
                _build(stock, changes, target)
                _prune(f"{found}-{part}-")
    os.utime(target)
    return target


def parts_of(part: str) -> tuple[str, ...]:
    """The parts that a ``--part`` stands for; each part needs those before it."""
    if part == "all":
        return PARTS
    if part not in PARTS:
        raise PatchError(f"no part {part!r}: all, {', '.join(PARTS)}")
    return PARTS[: PARTS.index(part) + 1]


def _stock(release: str | None) -> Tree:
    if release is None:
        return installed_tree()
    from vllm_pr.releases import stock_tree

    return open_tree(stock_tree(release))


def _engine() -> str:
    """What else a result depends on: the code that makes it."""
    digest = hashlib.sha256()
    for name in ("code", "edits", "engine", "plan", "prose", "trees"):
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


def _files(stock: Tree) -> Iterator[Path]:
    for folder, folders, names in os.walk(stock.package):
        folders[:] = sorted(name for name in folders if name != ".vllm-pr")
        yield from (Path(folder, name) for name in sorted(names))


def _listing(stock: Tree) -> list[str]:
    lines = []
    for path in _files(stock):
        if path.suffix != ".pyc":
            stat = path.stat()
            lines.append(f"{path} {stat.st_size} {stat.st_mtime_ns}")
    return lines


@contextmanager
def _locked() -> Iterator[None]:
    BUILD.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(BUILD, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _build(stock: Tree, changes: list[Change], target: Path) -> None:
    for left in BUILD.glob("tmp-*"):
        shutil.rmtree(left, ignore_errors=True)
    beside = Path(tempfile.mkdtemp(prefix="tmp-", dir=BUILD))
    edited = {Path(change.path) for change in changes}
    for path in _files(stock):
        relative = path.relative_to(stock.root)
        if relative not in edited and not _is_cache_of(relative, edited):
            _copy(path, beside / relative)
    for folder in stock.root.glob("vllm*.dist-info"):
        if stock.root.name != "site-packages" and not folder.name.startswith("vllm_pr"):
            shutil.copytree(folder, beside / folder.name)
    for change in changes:
        file = beside / change.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(change.after)
    beside.chmod(0o755)
    beside.rename(target)


def _is_cache_of(path: Path, edited: set[Path]) -> bool:
    if path.suffix != ".pyc":
        return False
    return path.parent.parent / f"{path.name.split('.')[0]}.py" in edited


def _copy(source: Path, target: Path) -> None:
    """A real copy, only shared libraries are linked."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if ".so" in source.suffixes:
        try:
            os.link(source, target)
        except OSError:
            target.symlink_to(source)
        return
    # A byte-code file may be renamed by a running import meanwhile.
    with suppress(FileNotFoundError) if source.suffix == ".pyc" else _always():
        shutil.copy2(source, target)


@contextmanager
def _always() -> Iterator[None]:
    yield


def _prune(prefix: str) -> None:
    trees = sorted(
        BUILD.glob(f"{prefix}*"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    for old in trees[_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
