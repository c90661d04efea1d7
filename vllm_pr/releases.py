# SPDX-License-Identifier: Apache-2.0
"""vLLM releases: what is known about each, and its files on disk.

The facts are in ``releases.toml``, and nothing else repeats them. Wheels and source
archives are fetched once by pip and kept under ``build/``; a folder is either whole or
not there.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_pr.patching.errors import PatchError

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
FACTS = Path(__file__).with_name("releases.toml")
SOURCE_DISTRIBUTION = "vllm"


class ReleaseError(PatchError):
    """A release that is not known or cannot be had; one line says why."""


@dataclass(frozen=True)
class Remedy:
    """What an operator can do about a fault.

    Attributes:
        fault: "session_switch", "first_branch" or "eagle_resend".
        say: One paragraph for the operator.
        run: The command.
        change: Whether the remedy is the change of this project.
    """

    fault: str
    say: str
    run: str
    change: bool


@dataclass(frozen=True)
class Release:
    """Facts about one release; ``releases.toml`` explains each."""

    version: str
    distribution: str
    engine: bool
    change: bool
    interval: str
    interval_set_by: str
    free_blocks: str
    junctions: bool
    eagle: str
    session_switch: str
    first_branch: str
    eagle_resend: str
    refusal: str = ""

    def remedies(self, fault: str) -> list[Remedy]:
        """What helps against a fault in this release, best first."""
        return [
            Remedy(fault, entry["say"], entry["run"], entry.get("change", False))
            for entry in _facts()["remedies"]
            if entry["fault"] == fault
            and SpecifierSet(entry["releases"]).contains(Version(self.version))
        ]


@lru_cache(maxsize=1)
def _facts() -> dict:
    with FACTS.open("rb") as file:
        return tomllib.load(file)


@lru_cache(maxsize=1)
def known_releases() -> tuple[Release, ...]:
    """All releases that the facts name, oldest first."""
    facts = _facts()
    releases = []
    for version, own in facts["releases"].items():
        group = facts["groups"][own["group"]]
        fields = facts["defaults"] | group | own
        del fields["group"]
        releases.append(Release(version, **fields))
    return tuple(sorted(releases, key=lambda release: Version(release.version)))


def changed_releases() -> tuple[Release, ...]:
    """The releases that the change is made for, oldest first."""
    return tuple(release for release in known_releases() if release.change)


def find_release(version: str) -> Release:
    """The release with a version; a local part such as ``+cpu`` does not count.

    Raises:
        ReleaseError: There are no facts about it.
    """
    known = {release.version: release for release in known_releases()}
    try:
        return known[Version(version).public]
    except (InvalidVersion, KeyError):
        raise ReleaseError(
            f"no such release here: {version} (known: {', '.join(known)})"
        ) from None


def nearest_release(version: str) -> Release | None:
    """The newest known release that is not newer than ``version``, if any.

    What a server says about itself may be a development build or a patch release.
    """
    try:
        wanted = Version(version).public
    except InvalidVersion:
        return None
    older = [
        release
        for release in known_releases()
        if Version(release.version) <= Version(wanted)
    ]
    return older[-1] if older else None


def installed_release() -> str:
    """The version of the vLLM in this environment, without a local part.

    Raises:
        PatchError: None is installed.
    """
    from vllm_pr.patching.tree import detect_version, installed_tree

    return Version(detect_version(installed_tree())).public


def stock_tree(release: str | None = None, unpacked: bool = False) -> Path:
    """A folder with the untouched ``vllm/`` of a release.

    Args:
        release: A known release, or None for the installed one.
        unpacked: Unpack the wheel of the installed release too, instead of taking
            the environment's ``site-packages``.

    Returns:
        The folder to put first on ``PYTHONPATH``. Of releases whose engine does not
        run here, it holds no shared library.

    Raises:
        ReleaseError: The release is not known, or pip cannot get its wheel.
    """
    if not unpacked:
        from vllm_pr.patching.tree import detect_version, installed_tree

        tree = installed_tree()
        if release is None or Version(detect_version(tree)).public == release:
            return tree.root
    found = find_release(release or installed_release())
    target = BUILD / f"stock-{found.version}"
    return _made(target, lambda folder: _unpack_wheel(found, folder))


def sdist_tree(release: str, known: bool = True) -> Path:
    """The source tree of a release, with its tests and docs.

    Args:
        release: Its version.
        known: Whether there are facts about it; a newer one has none yet.

    Raises:
        ReleaseError: The release is not known, or pip cannot get its archive.
    """
    found = (
        find_release(release)
        if known
        else replace(known_releases()[-1], version=release)
    )
    target = BUILD / f"sdist-{found.version}"
    return _made(target, lambda folder: _unpack_sdist(found, folder))


def _made(target: Path, make: Callable[[Path], None]) -> Path:
    """The folder ``target``, made in one piece if it is not there."""
    if target.is_dir():
        return target
    BUILD.mkdir(exist_ok=True)
    with _locked(BUILD / f".{target.name}.lock"):
        if target.is_dir():
            return target
        for left in BUILD.glob(f"tmp-{target.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"tmp-{target.name}-", dir=BUILD))
        try:
            make(folder)
            folder.chmod(0o755)
            folder.rename(target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unpack_wheel(release: Release, folder: Path) -> None:
    prefix = f"{release.distribution.replace('-', '_')}-{release.version}-"
    wheel = _fetched(
        "wheels",
        f"{prefix}*.whl",
        ["--only-binary", ":all:", f"{release.distribution}=={release.version}"],
        release,
    )
    with _progress(f"unpacking {wheel.name}") as advance, _archive(wheel) as archive:
        names = [
            info
            for info in archive.infolist()
            if release.engine or ".so" not in PurePosixPath(info.filename).suffixes
        ]
        for count, info in enumerate(names, 1):
            archive.extract(info, folder)
            advance(count, len(names))


@contextmanager
def _archive(wheel: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except zipfile.BadZipFile:
        raise ReleaseError(
            f"{wheel.name} in build/wheels is damaged: delete it and try again"
        ) from None


def _unpack_sdist(release: Release, folder: Path) -> None:
    version = release.version
    archive = _fetched(
        "sdists",
        f"vllm-{version}.tar.gz",
        [
            *("--no-binary", SOURCE_DISTRIBUTION, "--no-build-isolation"),
            f"{SOURCE_DISTRIBUTION}=={version}",
        ],
        release,
        VLLM_TARGET_DEVICE="empty",
        VLLM_VERSION_OVERRIDE=version,
    )
    with _progress(f"unpacking {archive.name}"):
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
        except (tarfile.TarError, EOFError):
            raise ReleaseError(
                f"{archive.name} in build/sdists is damaged: delete it and try again"
            ) from None
        inner = folder / f"vllm-{version}"
        for path in list(inner.iterdir()):
            path.rename(folder / path.name)
        inner.rmdir()


def _fetched(
    kind: str, pattern: str, wanted: list[str], release: Release, **environment: str
) -> Path:
    """The archive, from ``build/`` or by pip, which looks where it is set up to."""
    store = BUILD / kind
    store.mkdir(parents=True, exist_ok=True)
    for path in store.glob(pattern):
        return path
    beside = Path(tempfile.mkdtemp(prefix="tmp-", dir=store))
    command = [sys.executable, "-m", "pip", "download", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(beside), *wanted]
    try:
        with _progress(f"pip download {wanted[-1]}"):
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
            )
        found = list(beside.glob(pattern))
        if done.returncode or not found:
            raise ReleaseError(
                f"vLLM {release.version}: pip cannot get {wanted[-1]}: "
                f"{_reason(done.stdout + done.stderr)}"
            )
        return found[0].rename(store / found[0].name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _reason(output: str) -> str:
    """The line of pip's output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["no message"])[-1]
    return last.removeprefix("ERROR:").strip()


@contextmanager
def _progress(text: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(
        console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(text, total=None)

        def advance(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield advance
