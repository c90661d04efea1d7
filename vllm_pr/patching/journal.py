# SPDX-License-Identifier: Apache-2.0
"""Files changed all or none, and back to the byte, also after a SIGKILL.

What is to be done is written down first, below ``vllm/.vllm-pr/``: the manifest
(hashes before and after), the original contents, compressed, and the new contents.
When the manifest is there, one ``os.replace`` per file does the change. Every file is
thus old or new at any moment, the manifest tells which, and the originals are at hand:
from any point ``revert`` gets back, and ``apply`` starts over from there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
from packaging.version import Version

from vllm_pr.patching.errors import PatchError
from vllm_pr.patching.plan import Change
from vllm_pr.patching.tree import Tree

STATE = ".vllm-pr"
_MANIFEST = "manifest.json"
_NEW = "new"  # the new contents: goes last, when all is done
_FORMAT = 1
_NO_ORIGINAL = (
    "nothing was changed: install vLLM again, then `revert` takes away what is left"
)


@dataclass
class Entry:
    """A changed file: SHA-256 before (None: new file) and after, and its metadata."""

    path: str
    before: str | None
    after: str
    mode: int | None = None
    mtime_ns: int | None = None


@dataclass
class Cache:
    """A byte-code file of an edited module, taken away while the change is in."""

    path: str
    mode: int
    mtime_ns: int


@dataclass
class Manifest:
    """What was done to a tree.

    Attributes:
        version: What the tree said it was; ``release``: whose rules it got.
        fingerprint: Of the sources of the change.
        folders: Made for new files, outermost first.
        cache_folders: ``__pycache__`` folders that were there before.
    """

    tool: str
    version: str | None
    release: str
    fingerprint: str
    entries: list[Entry]
    folders: list[str] = field(default_factory=list)
    caches: list[Cache] = field(default_factory=list)
    cache_folders: list[str] = field(default_factory=list)
    format: int = _FORMAT


@dataclass
class _Format:
    """The part of a manifest that every version of it has."""

    format: int


@contextmanager
def locked(tree: Tree, shared: bool = False) -> Iterator[None]:
    """Hold the tree; the lock is on ``vllm/`` itself, so nothing is left behind.

    Raises:
        PatchError: Another process holds it.
    """
    descriptor = os.open(tree.package, os.O_RDONLY)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PatchError(
                f"another vllm-pr is at work on {tree.root}: wait for it to end"
            ) from None
        yield
    finally:
        os.close(descriptor)


def load(tree: Tree) -> Manifest | None:
    """The manifest of a tree; None where there is none (yet).

    Raises:
        PatchError: It is not one that this version reads.
    """
    state = tree.package / STATE
    if state.is_symlink() or (state.exists() and not state.is_dir()):
        raise PatchError(f"{state} is not a folder of vllm-pr: move it away")
    path = state / _MANIFEST
    if not path.is_file():
        return None
    try:
        content = path.read_bytes()
        found = msgspec.json.decode(content, type=_Format).format
        if found != _FORMAT:
            raise ValueError(f"its format is {found}, known is {_FORMAT}")
        manifest = msgspec.json.decode(content, type=Manifest)
        if manifest.version is not None:
            Version(manifest.version)
        return manifest
    except (ValueError, msgspec.DecodeError) as error:
        raise PatchError(
            f"{path} is not readable: {error}",
            "nothing was changed: uninstall vLLM, delete what is left of "
            f"{tree.package} and install it again",
        ) from None


def has_state(tree: Tree) -> bool:
    return os.path.lexists(tree.package / STATE)


def is_unfinished(tree: Tree) -> bool:
    """Whether an apply has begun and not come to its end."""
    return (tree.package / STATE / _NEW).exists()


def file_state(tree: Tree, entry: Entry) -> str:
    """``changed``, ``original``, ``edited`` or ``missing``."""
    path = tree.root / entry.path
    if not os.path.lexists(path):
        return "original" if entry.before is None else "missing"
    if path.is_symlink() or not path.is_file():
        return "edited"
    found = digest(path.read_bytes())
    if found == entry.after:
        return "changed"
    return "original" if found == entry.before else "edited"


def original(tree: Tree, manifest: Manifest, path: str) -> bytes | None:
    """The content that a file had before the change, None for a new file."""
    for index, entry in enumerate(manifest.entries):
        if entry.path == path and entry.before is not None:
            return _load_original(tree, f"{index}", entry.before)
    return None


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def check_places(tree: Tree, paths: dict[str, bool]) -> None:
    """Refuse what cannot or must not be written, before anything is.

    Args:
        paths: Upstream paths; True for a file that is there and will be replaced.

    Raises:
        PatchError: A line for each such place.
    """
    lines = []
    device = tree.package.stat().st_dev
    folders = {tree.package}
    for name, is_there in paths.items():
        path = tree.root / name
        folder = path.parent
        while not os.path.lexists(folder):
            folder = folder.parent
        folders.add(folder)
        real = Path(os.path.realpath(path))
        if real != path:
            lines.append(f"{path} leads over a symbolic link to {real}")
        elif not is_there and path.is_dir():
            lines.append(f"{path} is in the way: move it away")
        elif is_there and not _writable(path):
            lines.append(f"{path} is read-only")
    for folder in sorted(folders):
        if not folder.is_dir():
            lines.append(f"{folder} is not a folder")
        elif not _writable(folder):
            lines.append(f"{folder} is read-only")
        elif folder.stat().st_dev != device:
            lines.append(f"{folder} is on another file system than {tree.package}")
    if lines:
        raise PatchError(*lines, "nothing was changed")


def change(tree: Tree, changes: list[Change], manifest: Manifest) -> None:
    """Write the journal, then put every new content in its place.

    The manifest's entries are filled in here.

    Raises:
        PatchError: Something could not be written; the tree is as it was.
    """
    state = tree.package / STATE
    _make_folder(state)
    try:
        _write_journal(tree, changes, manifest, state)
        for folder in manifest.folders:
            _make_folder(tree.root / folder)
        for index, entry in enumerate(manifest.entries):
            os.replace(state / _NEW / str(index), tree.root / entry.path)
        _sync_folders(tree, manifest)
        for cache in manifest.caches:
            (tree.root / cache.path).unlink(missing_ok=True)
        shutil.rmtree(state / _NEW)
    except BaseException as error:
        restore(tree, manifest if (state / _MANIFEST).exists() else None)
        if isinstance(error, OSError):
            raise PatchError(
                f"cannot write {error.filename or tree.root}: {error.strerror}: "
                "all is as it was"
            ) from None
        raise


def restore(tree: Tree, manifest: Manifest | None, discard: bool = False) -> None:
    """Put every file back and take away all that was made.

    Args:
        manifest: What was done; None when only a journal was begun.
        discard: Put back also what was edited since.

    Raises:
        PatchError: An original is damaged or gone; nothing was changed.
    """
    state = tree.package / STATE
    if manifest is not None:
        for entry, content in _originals(tree, manifest, discard):
            _restore_file(tree, state, entry, content)
        _restore_caches(tree, state, manifest)
        for folder in reversed(manifest.folders):
            with suppress(OSError):  # not empty: the user has put something there
                os.rmdir(tree.root / folder)
        _sync_folders(tree, manifest)
        (state / _MANIFEST).unlink(missing_ok=True)
    if os.path.lexists(state):
        shutil.rmtree(state)
    _sync(tree.package)


def _originals(
    tree: Tree, manifest: Manifest, discard: bool
) -> list[tuple[Entry, bytes | None]]:
    """What is to be put back, all of it loaded and checked; None for a new file."""
    found = []
    for index, entry in enumerate(manifest.entries):
        state = file_state(tree, entry)
        if state == "changed" or (discard and state != "original"):
            new = entry.before is None
            content = None if new else _load_original(tree, f"{index}", entry.before)
            found.append((entry, content))
    return found


def _restore_file(tree: Tree, state: Path, entry: Entry, content: bytes | None) -> None:
    path = tree.root / entry.path
    if content is None:
        path.unlink()
    else:
        _put_back(content, state, path, entry.mode or 0o644, entry.mtime_ns or 0)


def _restore_caches(tree: Tree, state: Path, manifest: Manifest) -> None:
    """The byte code of changed modules goes, that of before comes back."""
    restored = {
        tree.root / entry.path
        for entry in manifest.entries
        if file_state(tree, entry) == "original"
    }
    for index, cache in enumerate(manifest.caches):
        path = tree.root / cache.path
        if _source_of(path) in restored and path.parent.is_dir():
            try:
                packed = (state / "old" / f"cache{index}").read_bytes()
                content = zlib.decompress(packed)
            except (OSError, zlib.error):
                path.unlink(missing_ok=True)  # Python makes it again
                continue
            _put_back(content, state, path, cache.mode, cache.mtime_ns)
    kept = {cache.path for cache in manifest.caches}
    for entry in manifest.entries:
        folder = (tree.root / entry.path).parent / "__pycache__"
        for path in _caches_of(tree.root / entry.path):
            if path.relative_to(tree.root).as_posix() not in kept:
                path.unlink(missing_ok=True)
        if folder.relative_to(tree.root).as_posix() not in manifest.cache_folders:
            with suppress(OSError):  # other modules have theirs there
                os.rmdir(folder)


def _write_journal(
    tree: Tree, changes: list[Change], manifest: Manifest, state: Path
) -> None:
    _make_folder(state / "old")
    _make_folder(state / _NEW)
    _write(state / ".gitignore", b"*\n")
    manifest.entries = []
    for index, item in enumerate(changes):
        path = tree.root / item.path
        entry = Entry(item.path, None, digest(item.after))
        new = state / _NEW / str(index)
        _write(new, item.after)
        if item.before is None:
            os.chmod(new, 0o644)
            manifest.folders += _missing_folders(tree, path, manifest.folders)
        else:
            found = path.stat()
            entry.before = digest(item.before)
            entry.mode, entry.mtime_ns = stat.S_IMODE(found.st_mode), found.st_mtime_ns
            _write(state / "old" / str(index), zlib.compress(item.before))
            os.chmod(new, entry.mode)
            with suppress(PermissionError):
                os.chown(new, found.st_uid, found.st_gid)
            _touch(new, entry.mtime_ns)
        manifest.entries.append(entry)
        _keep_caches(tree, path, manifest, state)
    content = json.dumps(asdict(manifest), indent=1).encode()
    _write(state / "manifest.new", content)
    _sync(state / "old")
    _sync(state / _NEW)
    os.replace(state / "manifest.new", state / _MANIFEST)
    _sync(state)
    _sync(tree.package)


def _keep_caches(tree: Tree, path: Path, manifest: Manifest, state: Path) -> None:
    folder = path.parent / "__pycache__"
    name = folder.relative_to(tree.root).as_posix()
    if folder.is_dir() and name not in manifest.cache_folders:
        manifest.cache_folders.append(name)
    for cache in _caches_of(path):
        try:
            content, found = cache.read_bytes(), cache.stat()
        except FileNotFoundError:  # renamed by a running import
            continue
        _write(state / "old" / f"cache{len(manifest.caches)}", zlib.compress(content))
        relative = cache.relative_to(tree.root).as_posix()
        mode = stat.S_IMODE(found.st_mode)
        manifest.caches.append(Cache(relative, mode, found.st_mtime_ns))


def _caches_of(path: Path) -> list[Path]:
    if path.suffix != ".py":
        return []
    return sorted((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"))


def _source_of(cache: Path) -> Path:
    return cache.parent.parent / f"{cache.name.split('.', 1)[0]}.py"


def _missing_folders(tree: Tree, path: Path, known: list[str]) -> list[str]:
    found = []
    folder = path.parent
    while not folder.exists():
        found.append(folder.relative_to(tree.root).as_posix())
        folder = folder.parent
    return [name for name in reversed(found) if name not in known]


def _touch(path: Path, old_mtime_ns: int) -> None:
    """Python compares whole seconds (and sizes) to find stale byte code."""
    now = time.time_ns()
    if now // 10**9 == old_mtime_ns // 10**9:
        now += 10**9
    os.utime(path, ns=(now, now))


def _load_original(tree: Tree, name: str, expected: str) -> bytes:
    path = tree.package / STATE / "old" / name
    try:
        content = zlib.decompress(path.read_bytes())
    except (OSError, zlib.error) as error:
        raise PatchError(f"{path} is not readable: {error}", _NO_ORIGINAL) from None
    if digest(content) != expected:
        raise PatchError(f"{path} is not what the manifest says", _NO_ORIGINAL)
    return content


def _put_back(
    content: bytes, state: Path, path: Path, mode: int, mtime_ns: int
) -> None:
    beside = state / "back"
    _write(beside, content)
    os.chmod(beside, mode)
    with suppress(PermissionError):
        owner = (path if path.exists() else path.parent).stat()
        os.chown(beside, owner.st_uid, owner.st_gid)
    os.utime(beside, ns=(mtime_ns, mtime_ns))
    os.replace(beside, path)


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    _own_like_parent(path)


def _make_folder(path: Path) -> None:
    os.mkdir(path)
    _own_like_parent(path)


def _own_like_parent(path: Path) -> None:
    owner = path.parent.stat()
    with suppress(PermissionError):
        os.chown(path, owner.st_uid, owner.st_gid)


def _writable(path: Path) -> bool:
    effective = os.access in os.supports_effective_ids
    return os.access(path, os.W_OK, effective_ids=effective)


def _sync_folders(tree: Tree, manifest: Manifest) -> None:
    changed = [entry.path for entry in manifest.entries] + manifest.folders
    for folder in {(tree.root / path).parent for path in changed}:
        if folder.is_dir():
            _sync(folder)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
