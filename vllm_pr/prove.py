# SPDX-License-Identifier: Apache-2.0
"""``vllm-pr prove``: the upstream-bound tests on stock and on changed, side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from vllm_pr.outputs import Console, JsonFile

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "v1" / "core"


@dataclass(frozen=True)
class Outcome:
    """One test, as ``file::name``, on both sides: passed, failed or error."""

    test: str
    stock: str
    changed: str


def run_tests(tree: Path | None, tests: Iterable[Path]) -> dict[str, str]:
    """Run test files against the vLLM in ``tree``, or the installed one.

    Args:
        tree: Folder that holds ``vllm/``; put first on ``PYTHONPATH``.
        tests: Test files.

    Returns:
        Outcome (passed, failed, error) by test, named ``file::name``. A file that
        cannot be imported is one test, named after the file.

    Raises:
        RuntimeError: pytest wrote no report.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-pr-") as folder:
        report = Path(folder) / "report.xml"
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        argv += ["-c", str(ROOT / "pyproject.toml"), f"--junitxml={report}"]
        env = dict(os.environ, PYTHONPATH=str(tree) if tree else "")
        env["VLLM_TARGET_DEVICE"] = "cpu"  # a wheel for GPUs does not say so
        done = subprocess.run(
            argv + [str(test) for test in tests],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if not report.exists():
            raise RuntimeError(f"pytest wrote no report:\n{done.stdout[-2000:]}")
        return dict(_outcomes(ET.parse(report).getroot()))


def _outcomes(report: ET.Element) -> Iterable[tuple[str, str]]:
    for case in report.iter("testcase"):
        module = (case.get("classname") or case.get("name") or "").split(".")[-1]
        name = case.get("name") or ""
        test = f"{module}::{name}" if case.get("classname") else module
        failed = case.find("failure") is not None
        error = case.find("error") is not None
        yield test, "failed" if failed else "error" if error else "passed"


def compare(stock: dict[str, str], changed: dict[str, str]) -> list[Outcome]:
    """Pair the outcomes; a file that stock cannot import counts for all its tests."""
    return [
        Outcome(test, stock.get(test) or stock.get(test.split("::")[0], "missing"), new)
        for test, new in changed.items()
    ]


def prove(
    release: Annotated[
        str | None, typer.Option(help="A release instead of the installed vLLM.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Run the upstream-bound tests on stock and on changed vLLM.

    Exit status 1 when one fails on changed, or none of a file's fails on stock.
    """
    from vllm_pr.patching.sources import Sources
    from vllm_pr.patching.trees import changed_tree
    from vllm_pr.releases import find_release, installed_release, stock_tree

    console = Console(stderr=True)
    version = find_release(release).version if release else installed_release()
    exported = Sources().selected_new_files(version)
    tests = [
        file for file in sorted(TESTS.glob("test_*.py")) if _name(file) in exported
    ]
    if not tests:
        console.print(
            f"vllm-pr: the tests are for newer releases than {release}: its evidence "
            "is vllm-pr matrix",
            highlight=False,
        )
        raise typer.Exit(2)
    tree = stock_tree(release) if release else None
    with console.status("the tests on changed, about half a minute"):
        changed = run_tests(changed_tree(release), tests)
    with console.status("the same on stock, where they must fail"):
        stock = run_tests(tree, tests)
    outcomes = compare(stock, changed)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
    bad = print_outcomes(outcomes)
    raise typer.Exit(1 if bad else 0)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def print_outcomes(outcomes: list[Outcome]) -> bool:
    """Print one row a file; True when the evidence is not there."""
    table = Table("tests", "cases", "fail on stock", "pass on changed")
    bad = not outcomes
    for file in sorted({o.test.split("::")[0] for o in outcomes}):
        rows = [o for o in outcomes if o.test.split("::")[0] == file]
        fails = sum(o.stock != "passed" for o in rows)
        passes = sum(o.changed == "passed" for o in rows)
        table.add_row(file, str(len(rows)), str(fails), str(passes))
        bad = bad or passes < len(rows) or not fails
    console = Console()
    console.print(table)
    for outcome in outcomes:
        if outcome.changed != "passed":
            console.print(f"{outcome.changed} on changed: {outcome.test}", style="red")
    return bad
