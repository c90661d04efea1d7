# SPDX-License-Identifier: Apache-2.0
"""Where upstream's tests come from, which of them count, and what they run beside."""

import fcntl
import fnmatch
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_pr.engine.models import BUILD
from vllm_pr.upstream.hub import write_hub

FOLDER = BUILD / "upstream"
SIDES = ("stock", "changed")
# Whole folders, and every other file that names a part of the pool or the interval.
_FOLDERS = ("core", "kv_connector/unit", "kv_offload", "simple_kv_offload")
_POOL = re.compile(
    r"BlockPool|block_pool|FreeKVCacheBlockQueue|free_block_queue|KVCacheBlock\b"
    r"|KVCacheManager|KVCacheCoordinator|kv_cache_utils|create_scheduler"
    r"|BlockStored|BlockRemoved|KVEventBatch|EventPublisher"
    r"|prefix_cache_retention_interval"
)
_OTHERS = ("v1", "distributed", "engine", "config")
_COPIED = ("tests", "examples", "pyproject.toml")
_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
# torchvision's library does not load beside this torch; its Python part, which the
# classes of multi-modal models import, asks for no more than these two declarations.
_DECLARED = """\
import torch
for _name in ("nms", "qnms"):
    _form = "(Tensor a, Tensor b, float c) -> Tensor"
    torch.library.define(f"torchvision::{_name}", _form)
"""


@dataclass(frozen=True)
class Side:
    """One side of the comparison.

    Attributes:
        name: "stock" or "changed".
        release: The vLLM release, as ``0.32.0``.
        root: This side's own copy of the tests, the working directory.
        env: The complete environment of a test process.
    """

    name: str
    release: str
    root: Path
    env: dict[str, str]

    @property
    def logs(self) -> Path:
        """Folder for the output of the test processes."""
        return FOLDER / self.release / "logs" / self.name


@contextmanager
def both_sides(release: str | None, part: str) -> Iterator[tuple[Side, Side]]:
    """Lay out both sides under ``build/upstream/``, and keep others from doing so.

    Args:
        release: A release, or None for the installed one.
        part: Part of the change that *changed* has, see ``changed_tree``.

    Raises:
        PatchError: The change does not fit the release.
        ValueError: No such release, its tests cannot be had, or they are running.
    """
    from vllm_pr.patching.support import supported
    from vllm_pr.patching.trees import changed_tree
    from vllm_pr.releases import installed_release, sdist_tree, stock_tree

    if release is not None:  # before a wheel is fetched
        release = supported(release)
    trees = (stock_tree(release) if release else None, changed_tree(release, part))
    release = release or installed_release()
    source = sdist_tree(release)
    with _locked(FOLDER / release):
        packages, hub = _packages(), write_hub(FOLDER / "hub")
        sides = []
        for name, tree in zip(SIDES, trees, strict=True):
            root = _copy_tests(source, FOLDER / release / name)
            if name == "changed":
                _edit_tests(root, release, part)
            folders = [str(folder) for folder in (tree, packages) if folder]
            sides.append(Side(name, release, root, _environment(folders, hub)))
        yield tuple(sides)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ValueError(f"upstream's tests of {folder.name} are running") from None
    finally:
        os.close(descriptor)


def select(root: Path, only: str | None = None) -> list[str]:
    """The test files to run, relative to ``root``.

    Args:
        root: A copy of the tests.
        only: Keep those whose path contains this text or matches this glob.
    """
    v1 = root / "tests" / "v1"
    chosen = {file for part in _FOLDERS for file in (v1 / part).rglob("test_*.py")}
    for folder in _OTHERS:
        for file in set((root / "tests" / folder).rglob("test_*.py")) - chosen:
            if _POOL.search(file.read_text(encoding="utf-8")):
                chosen.add(file)
    names = sorted(str(file.relative_to(root)) for file in chosen)
    if only:
        names = [x for x in names if only in x or fnmatch.fnmatch(x, only)]
    return names


def _copy_tests(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in _COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)
        elif (source / name).exists():
            shutil.copy2(source / name, target / name)
    return target


def _edit_tests(root: Path, release: str, part: str) -> None:
    """Change what the change itself changes in upstream's tests."""
    from vllm_pr.patching import engine
    from vllm_pr.patching.sources import Sources
    from vllm_pr.patching.trees import parts_of

    for edits in Sources().edits:
        rules = edits.select(release, parts_of(part))
        file = root / edits.edits
        if rules and edits.edits.startswith("tests/"):
            file.write_bytes(engine.rewrite(file.read_bytes(), edits, rules, release))


def _packages() -> Path:
    """Folder with what the tests import on top of the environment."""
    target = FOLDER / "packages"
    stamp = target / _REQUIREMENTS.name
    if stamp.is_file() and stamp.read_bytes() == _REQUIREMENTS.read_bytes():
        return target
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--target", str(target), "--requirement", str(_REQUIREMENTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(f"cannot install {_REQUIREMENTS.name} of the tests: {last}")
    vision = target / "torchvision" / "__init__.py"
    vision.write_text(_DECLARED + vision.read_text(encoding="utf-8"), encoding="utf-8")
    shutil.copy2(_REQUIREMENTS, stamp)
    return target


def _environment(folders: list[str], hub: Path) -> dict[str, str]:
    dropped = ("VLLM_", "PYTHONPATH", "PYTEST_", "HF_", "COV_CORE_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(folders),
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(hub),
        "VLLM_CACHE_ROOT": str(hub.parent / "cache"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
