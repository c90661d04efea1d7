# SPDX-License-Identifier: Apache-2.0
"""What a user gets wrong is one clear line, and nothing is started or written."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_kit import one_line, wait_for
from patching_kit import snapshot
from typer.testing import CliRunner

from vllm_pr.cli import app
from vllm_pr.engine.processes import EngineError
from vllm_pr.engine.runner import start_engine
from vllm_pr.engine.server import serve
from vllm_pr.patching.sources import Sources
from vllm_pr.patching.tree import installed_tree
from vllm_pr.patching.trees import changed_tree

VERSION = "vllm/_version.py"
POOL = "vllm/v1/core/block_pool.py"
SCRIPT = [sys.executable, "-c", "from vllm_pr.cli import main; main()"]


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """The files of the changed vLLM that the change is in."""
    source, target = changed_tree(), tmp_path / "tree"
    sources = Sources()
    edited = [edit.edits for edit in sources.edits]
    for name in ("vllm/__init__.py", VERSION, *edited, *sources.new_files):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target / name)
    return target


def refused(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    return done.stderr


def test_changed_tree_whose_version_is_not_known(changed):
    text = "__version__ = version = '9.9.9'\n"
    (changed / VERSION).write_text(text, encoding="utf-8")
    before = snapshot(changed)
    assert "vLLM 9.9.9 is newer than" in refused("apply", changed)
    assert snapshot(changed) == before


def test_proof_where_the_change_is_applied(tmp_path):
    """It is said before a test runs, which could not even start."""
    (tmp_path / "vllm/.vllm-pr").mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").touch()
    program = (
        "import pathlib, sys; from vllm_pr.cli import main; "
        "from vllm_pr.patching import tree, trees; "
        "found = tree.open_tree(pathlib.Path(sys.argv.pop())); "
        "trees.installed_tree = lambda: found; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "proof", "queue", str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTEST_ADDOPTS": "--collect-only"},
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "is not stock: run vllm-pr revert on it first" in one_line(done.stderr)


def test_half_applied_tree(changed):
    stock = installed_tree().root
    shutil.copy(stock / POOL, changed / POOL)
    before = snapshot(changed)
    for command in ("apply", "revert"):
        said = refused(command, changed)
        assert "partly" in said and "but not" in said
    assert snapshot(changed) == before


RESULTS = (
    *(("prove", "--json"), ("proof", "--json"), ("bench", "--json")),
    *(("upstream", "--json"), ("matrix", "--json"), ("demo", "--json")),
    ("doctor", "--yes", "--url", "http://127.0.0.1:1", "--json"),
)


@pytest.mark.parametrize("words", RESULTS, ids=lambda words: words[0])
def test_a_result_that_cannot_be_written_is_told_first(words, tmp_path, monkeypatch):
    """As root everything can be written, so the answer of the system is given."""
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    for path, says in (
        (tmp_path, "it is a folder"),
        (tmp_path / "missing" / "file", f"there is no folder {tmp_path / 'missing'}"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        line = one_line(refused(*words, path))
        assert f"{words[-1]} {path}: {says}" in line
    file = tmp_path / "file"
    file.write_text("before")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != file)
    assert f"{file}: no permission" in one_line(refused(*words, file))
    assert file.read_text() == "before"


def test_plots_that_cannot_be_written_are_told_first(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    file = tmp_path / "file"
    file.write_text("before")
    for path in (file, file / "below"):
        line = one_line(refused("bench", "--plots", path))
        assert f"--plots {path}: {file} is not a folder" in line
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    line = one_line(refused("bench", "--plots", tmp_path / "new" / "newer"))
    assert "no permission" in line


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_reader_that_goes_away_changes_no_exit_status(changed, as_json):
    """1 would say that the change is not there."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*SCRIPT, "status", changed, *as_json],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_terminated_leaves_nothing_behind(tmp_path):
    env = dict(os.environ, TMPDIR=str(tmp_path))
    with subprocess.Popen(
        [*SCRIPT, "prove"], env=env, stderr=subprocess.DEVNULL
    ) as process:
        wait_for(lambda: list(tmp_path.glob("vllm-pr-*")))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_for(children.read_text)
        running = [Path("/proc", pid) for pid in children.read_text().split()]
        process.terminate()
        assert process.wait() > 0
    assert not list(tmp_path.glob("vllm-pr-*"))
    assert not any(path.exists() for path in running)


def test_wrong_model_folder(tmp_path):
    missing = tmp_path / "missing"
    for folder, says in ((missing, "no such folder"), (tmp_path, "no config.json")):
        with (
            pytest.raises(ValueError, match=f"no model in {folder}: .*{says}"),
            start_engine("gemma3-tiny", engine_args={"model": str(folder)}),
        ):
            pytest.fail("the engine started")


def test_server_with_a_pool_too_small_for_one_request():
    with (
        pytest.raises(EngineError, match="To serve at least one request") as failed,
        serve("gemma3-tiny", "changed", blocks=40),
    ):
        pytest.fail("the server started")
    assert "\n" not in str(failed.value)
