# SPDX-License-Identifier: Apache-2.0
"""``vllm-pr upstream``: whatever a test does, its outcome comes back on both sides."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_pr.cli import app
from vllm_pr.upstream import command, runs, sources
from vllm_pr.upstream.compare import Rerun, compare, last_line, reason_class
from vllm_pr.upstream.hub import write_hub
from vllm_pr.upstream.runs import Outcome, Runner
from vllm_pr.upstream.sources import Side

MISBEHAVING = """
import os, signal, time
import pytest

def test_passes(): pass
def test_fails(): assert not "a reason"
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
def test_after_death(): pass
@pytest.mark.skip(reason="not here")
def test_skips(): pass
@pytest.mark.parametrize("text", ["a b", "ü", "x\\ny", "::"])
def test_names(text): pass
def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    while True: time.sleep(1)
def test_last(): pass
@pytest.fixture
def broken():
    yield
    raise RuntimeError("in the teardown")
def test_teardown_fails(broken): pass
"""
OUTCOMES = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_ends(number):
    if number == 2: pytest.skip("not here")
    assert number or "stock" in __file__
"""
NEEDS_A_PACKAGE = "import no_such_package_anywhere\n"
FLAKY = """
from pathlib import Path
def test_flaky():
    seen = Path(__file__).with_suffix(".seen")
    again = seen.exists()
    seen.touch()
    assert again or "stock" in __file__
def test_lost(): assert "stock" in __file__
def test_won(): assert "changed" in __file__
def test_always(): pass
"""


@pytest.fixture
def make_side(tmp_path: Path, monkeypatch) -> Callable[..., Side]:
    """Sides with tests of our own instead of upstream's."""
    monkeypatch.setattr(sources, "FOLDER", tmp_path)

    def make(name: str, **files: str) -> Side:
        root = tmp_path / "0.0" / name
        (root / "tests").mkdir(parents=True)
        for file, text in files.items():
            (root / "tests" / f"test_{file}.py").write_text(text, encoding="utf-8")
        return Side(name, "0.0", root, {**os.environ, "PYTHONPATH": ""})

    return make


def statuses(outcomes: dict[str, Outcome]) -> dict[str, str]:
    return {test.split("::", 1)[-1]: x.status for test, x in outcomes.items()}


def test_a_file_that_dies_and_hangs_costs_two_tests(make_side, monkeypatch):
    monkeypatch.setattr(runs, "STALL_SECONDS", 5)
    with closing(Runner(make_side("stock", bad=MISBEHAVING))) as runner:
        outcomes = runner.run("tests/test_bad.py")
    told = statuses(outcomes)
    names = {name for name in told if name.startswith("test_names")}
    assert len(names) == 4 and {told.pop(name) for name in names} == {"passed"}
    assert told == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_dies": "failed",
        "test_after_death": "passed",
        "test_skips": "skipped",
        "test_hangs": "failed",
        "test_last": "passed",
        "test_teardown_fails": "failed",
    }
    reasons = {test.split("::")[1]: x.reason for test, x in outcomes.items()}
    assert reasons["test_dies"] == "process died: signal 9"
    assert reasons["test_hangs"] == "timed out: nothing happened for 5 s"
    assert "a reason" in reasons["test_fails"]
    assert "in the teardown" in reasons["test_teardown_fails"]


def test_a_file_that_does_not_import_is_one_outcome(make_side):
    with closing(Runner(make_side("stock", bad=NEEDS_A_PACKAGE))) as runner:
        (outcome,) = runner.run("tests/test_bad.py").items()
    assert outcome[0] == "tests/test_bad.py"
    assert reason_class(outcome[1].reason) == "missing package"
    assert "no_such_package_anywhere" in last_line(outcome[1].reason)


def test_a_bare_assertion_is_classed_by_what_it_asserts():
    reason = ">       assert tensor.is_cuda\nE       AssertionError\n"
    assert reason_class(reason) == "needs GPU"
    assert last_line(reason) == "assert tensor.is_cuda"


@pytest.fixture
def flaky_sides(make_side) -> Iterator[tuple[Side, ...]]:
    yield tuple(make_side(name, flaky=FLAKY) for name in sources.SIDES)


def test_the_lost_are_run_again_and_the_flaky_told(flaky_sides, monkeypatch, tmp_path):
    laid_out = contextmanager(lambda release, part: (yield flaky_sides))
    monkeypatch.setattr(command, "both_sides", laid_out)
    monkeypatch.setattr(command, "select", lambda root, only: ["tests/test_flaky.py"])
    results = tmp_path / "results.json"
    done = CliRunner().invoke(app, ["upstream", "--json", str(results)])
    assert done.exit_code == 1, done.output
    found = json.loads(results.read_text())
    name = "tests/test_flaky.py::test_"
    assert found["passed_both"] == [name + "always"]
    assert found["failed_both"] == found["skipped_both"] == []
    assert (found["lost"], found["won"]) == ([name + "lost"], [name + "won"])
    again = ["passed"] * command.RERUNS
    assert found["flaky"] == {
        name + "flaky": {"stock": ["passed", *again], "changed": ["failed", *again]}
    }
    for told in (f"lost: {name}lost", f"won: {name}won", f"flaky: {name}flaky"):
        assert told in done.stdout


@pytest.mark.parametrize(
    ("stock", "changed", "flaky"),
    [
        ("passed passed", "failed passed", True),
        ("passed failed", "failed failed", True),
        ("passed passed passed", "failed passed failed", False),
        ("passed passed", "failed failed", False),
    ],
)
def test_what_counts_as_flaky(stock, changed, flaky):
    assert Rerun(tuple(stock.split()), tuple(changed.split())).flaky is flaky


def test_every_test_of_either_side_is_in_one_list():
    kinds = ("passed", "failed", "skipped", None)
    pairs = {f"{a} {b}": (a, b) for a in kinds for b in kinds if a or b}
    sides = [
        {name: Outcome(pair[i]) for name, pair in pairs.items() if pair[i]}
        for i in range(2)
    ]
    found = compare(*sides)
    lists = (found.passed_both, found.failed_both, found.skipped_both)
    assert sorted(sum((*lists, found.lost, found.won), [])) == sorted(pairs)
    assert found.passed_both == ["passed passed"]
    assert found.skipped_both == ["skipped skipped"]
    assert found.lost == ["passed None", "passed failed", "passed skipped"]
    assert found.won == ["None passed", "failed passed", "skipped passed"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("E   ModuleNotFoundError: No module named 'nixl'", "missing package"),
        ("E   AssertionError: Torch not compiled with CUDA enabled", "needs GPU"),
        ("E   LocalEntryNotFoundError: outgoing traffic is disabled", "needs network"),
        ("E   RuntimeError: Cannot find any model weights with `x`", "needs network"),
        ("timed out: nothing happened for 600 s", "timed out"),
        ("    cuda = 1\nE   assert 1 == 2", "other"),
    ],
)
def test_reason_classes(text, expected):
    assert reason_class(text) == expected


def test_hub_is_found_by_its_readers(tmp_path):
    from huggingface_hub import try_to_load_from_cache

    hub = write_hub(tmp_path / "hub")
    before = {file: file.stat().st_mtime_ns for file in hub.rglob("*")}
    assert write_hub(hub) == hub
    assert {file: file.stat().st_mtime_ns for file in hub.rglob("*")} == before
    for file in ("config.json", "tokenizer.json"):
        found = try_to_load_from_cache("facebook/opt-125m", file, hub / "hub")
        assert isinstance(found, str) and Path(found).is_file()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--only", "no_such_test"), "no test file matches 'no_such_test'"),
        (("--release", "0.1.0"), "no such release here: 0.1.0"),
        (("--release", "0.20.0"), "0.20.0 is not supported: it has"),
        (("--json", "/no/such/folder/x.json"), "no folder /no/such/folder"),
        (("--part", "half"), "no part 'half'"),
    ],
)
def test_bad_input_is_one_line(words, says):
    done = CliRunner().invoke(app, ["upstream", *words])
    assert done.exit_code == 2
    assert says in done.stderr and done.stderr.count("\n") == 1


def test_files_at_a_time_change_no_outcome(make_side):
    texts = {f"f{number}": OUTCOMES for number in range(5)}
    sides = tuple(make_side(name, **texts) for name in sources.SIDES)
    files = [f"tests/test_{name}.py" for name in texts]
    console = Console(quiet=True)
    one, many = (command.run_all(sides, files, console, jobs) for jobs in (1, 3))
    assert one == many
    assert {len(outcomes) for outcomes in many.values()} == {15}


def test_a_side_that_does_not_start_ends_all_workers(make_side):
    sides = [make_side(name, **dict.fromkeys("abcd", FLAKY)) for name in sources.SIDES]
    (sides[1].root / "pytest.py").write_text("raise RuntimeError('on purpose')\n")
    files = [f"tests/test_{name}.py" for name in "abcd"]
    with pytest.raises(RuntimeError, match="nothing starts on changed"):
        command.run_all(tuple(sides), files, Console(quiet=True), 2)


def test_two_runs_of_a_release_do_not_mix(tmp_path, monkeypatch):
    with (
        sources._locked(tmp_path / "0.0"),
        pytest.raises(ValueError, match="tests of 0.0 are running"),
    ):
        sources._locked(tmp_path / "0.0").__enter__()
    with sources._locked(tmp_path / "0.0"):
        pass


def test_one_file_of_upstream_passes_on_both(tmp_path):
    results = tmp_path / "results.json"
    words = ["upstream", "--only", "tests/v1/core/test_output.py", "--json", results]
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == 0, done.output
    found = json.loads(results.read_text())
    assert len(found["passed_both"]) == 6
    assert not any(found[name] for name in ("failed_both", "lost", "won", "flaky"))
