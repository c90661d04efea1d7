# SPDX-License-Identifier: Apache-2.0
"""``apply``, ``status`` and ``revert``: all or nothing, at any point of time."""

from __future__ import annotations

import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import patching_kit as kit
import pytest

from vllm_pr.patching import journal
from vllm_pr.patching.errors import PatchError
from vllm_pr.patching.operations import apply, revert, status
from vllm_pr.patching.sources import Sources
from vllm_pr.patching.state import EXIT_CODES
from vllm_pr.patching.tree import Tree, installed_tree, open_tree

EDITED = {"vllm/v1/core/pool.py", "docs/design/page.md"}
POOL = "vllm/v1/core/pool.py"
NEW = {"vllm/v1/core/segmented.py", "tests/v1/segments/test_segmented.py"}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return kit.make_tree(tmp_path / "tree")


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return kit.make_sources(tmp_path / "sources")


def changed_paths(before: dict, after: dict) -> set[str]:
    names = before.keys() | after.keys()
    return {name for name in names if before.get(name) != after.get(name)}


def without_state(found: dict) -> dict:
    return {name: what for name, what in found.items() if journal.STATE not in name}


def test_apply_changes_exactly_the_change_and_revert_restores_all(tree, sources):
    before = kit.snapshot(tree.root)
    assert status(tree, sources).state == "not applied"
    outcome = apply(tree, sources)
    assert outcome.action == "applied"
    assert set(outcome.files) == EDITED | NEW
    after = without_state(kit.snapshot(tree.root))
    assert changed_paths(before, after) == EDITED | NEW | {"tests/v1/segments"}
    pool = tree.root / "vllm/v1/core/pool.py"
    assert "Segmented(blocks)  # a list" in pool.read_text()
    assert pool.stat().st_mode & 0o777 == 0o640
    found = status(tree, sources)
    assert (found.state, found.by, found.release) == ("applied", "vllm-pr", kit.RELEASE)
    assert set(found.files.values()) == {"changed"}
    outcome = revert(tree, sources)
    assert outcome.action == "reverted"
    assert kit.snapshot(tree.root) == before
    assert status(tree, sources).state == "not applied"


def test_second_apply_and_second_revert_do_nothing(tree, sources):
    apply(tree, sources)
    once = kit.snapshot(tree.root)
    assert apply(tree, sources).action == "already applied"
    assert kit.snapshot(tree.root) == once
    revert(tree, sources)
    gone = kit.snapshot(tree.root)
    assert revert(tree, sources).action == "not applied"
    assert kit.snapshot(tree.root) == gone


def test_a_package_without_sources_gets_no_tests_and_docs(tmp_path, sources):
    tree = kit.make_tree(tmp_path / "site")
    (tree.root / "pyproject.toml").unlink()
    tree = open_tree(tree.root)
    outcome = apply(tree, sources)
    assert set(outcome.files) == {"vllm/v1/core/pool.py", "vllm/v1/core/segmented.py"}
    assert status(tree, sources).state == "applied"


def test_the_state_folder_is_ignored_by_git(tree, sources):
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-c", "user.name=A", "-c", "user.email=a@b.c", *words],
            cwd=tree.root,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message=base")
    apply(tree, sources)
    shown = git("status", "--porcelain", "--untracked-files=all").splitlines()
    assert {line[3:] for line in shown} == EDITED | NEW
    revert(tree, sources)
    assert git("status", "--porcelain") == ""


# --- SIGKILL at every step


def killed(step: int, run, *args) -> bool:
    """Whether the run was killed before its step-th file-system call."""

    def body() -> None:
        kit.kill_at(step)
        run(*args)

    code = kit.child(body)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def check_whole(tree: Tree, old: dict, new: dict) -> None:
    """Every file of the tree is as before or as after, never between."""
    now = without_state(kit.snapshot(tree.root, times=False))
    for name in old.keys() | new.keys():
        known = (old.get(name), new.get(name))
        assert now.get(name) in known, name


def check_recovery(copy: Path, tree: Tree, sources: Sources, before: dict) -> None:
    """From a killed state, status says what is there; revert and apply complete."""
    found = status(tree, sources)
    states = set(found.files.values())
    if found.state == "partly":
        assert states <= {"original", "changed"} and found.notes
    else:
        wanted = {"applied": {"changed"}, "not applied": {"original"}}
        assert states == wanted[found.state]
    shutil.copytree(tree.root, copy)
    revert(tree, sources)
    assert kit.snapshot(tree.root) == before
    other = open_tree(copy)
    apply(other, sources)
    assert status(other, sources).state == "applied"
    assert not (copy / CACHE).exists()
    revert(other, sources)
    assert kit.snapshot(copy) == before


CACHE = "vllm/v1/core/__pycache__/pool.cpython-311.pyc"


def make_tree(root: Path) -> Tree:
    """A tree with byte code of an edited module, which comes back too."""
    return kit.make_tree(root, **{CACHE: b"byte code"})


def each_kill(tmp_path: Path, prepare, run) -> Iterator[tuple[Tree, Path]]:
    """A tree killed at step 1, 2, ... of ``run``, until it is through."""
    for step in range(1, 1000):
        tree = make_tree(tmp_path / f"{step}")
        prepare(tree)
        through = not killed(step, run, tree)
        yield tree, tmp_path / f"{step}-copy"
        shutil.rmtree(tree.root)
        shutil.rmtree(tmp_path / f"{step}-copy", ignore_errors=True)
        if through:
            assert step > 30
            return
    pytest.fail("no end of steps")


@pytest.fixture
def fast_sync(monkeypatch) -> None:
    """Nobody pulls the plug here: syncs are counted, but wait for no disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("fast_sync")
def test_apply_killed_at_any_step(tmp_path, sources):
    reference = make_tree(tmp_path / "reference")
    before = kit.snapshot(reference.root)
    old = kit.snapshot(reference.root, times=False)
    apply(reference, sources)
    new = without_state(kit.snapshot(reference.root, times=False))
    seen = set()
    for tree, copy in each_kill(
        tmp_path, lambda tree: None, lambda t: apply(t, sources)
    ):
        check_whole(tree, old, new)
        seen.add(status(tree, sources).state)
        if status(tree, sources).state == "applied":
            assert without_state(kit.snapshot(tree.root, times=False)) == new
            assert not (tree.package / journal.STATE / "new").exists()
        check_recovery(copy, tree, sources, before)
    assert seen == {"not applied", "partly", "applied"}


@pytest.mark.usefixtures("fast_sync")
def test_revert_killed_at_any_step(tmp_path, sources):
    reference = make_tree(tmp_path / "reference")
    before = kit.snapshot(reference.root)
    old = kit.snapshot(reference.root, times=False)
    apply(reference, sources)
    new = without_state(kit.snapshot(reference.root, times=False))
    seen = set()
    for tree, copy in each_kill(
        tmp_path, lambda t: apply(t, sources), lambda t: revert(t, sources)
    ):
        check_whole(tree, old, new)
        seen.add(status(tree, sources).state)
        check_recovery(copy, tree, sources, before)
    assert seen == {"not applied", "partly", "applied"}


@pytest.mark.usefixtures("fast_sync")
def test_update_killed_at_any_step(tmp_path, sources):
    def prepare(tree: Tree) -> None:
        for top in ("tests", "docs"):
            shutil.rmtree(tree.root / top)
        apply(tree, sources)

    reference = make_tree(tmp_path / "reference")
    prepare(reference)
    revert(reference, sources)
    before = kit.snapshot(reference.root)
    newer = kit.make_sources(
        tmp_path / "newer", **{"vllm/v1/core/segmented.py": "# newer\n"}
    )
    for tree, copy in each_kill(tmp_path, prepare, lambda t: apply(t, newer)):
        check_recovery(copy, tree, newer, before)


def test_the_manifest_goes_before_the_originals(tree, sources, monkeypatch):
    """So that a manifest is never without what it needs, in any order of removal."""
    apply(tree, sources)
    state = tree.package / journal.STATE
    remove, seen = shutil.rmtree, []

    def removing(path):
        seen.append((state / "manifest.json").exists())
        remove(path)

    monkeypatch.setattr(journal.shutil, "rmtree", removing)
    revert(tree, sources)
    assert seen == [False]


def test_an_error_half_way_puts_everything_back(tree, sources, monkeypatch):
    before = kit.snapshot(tree.root)
    replace, calls = os.replace, []

    def failing(source, target):
        calls.append(target)
        if len(calls) == 4:
            raise OSError(28, "No space left on device", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(PatchError, match="No space left on device"):
        apply(tree, sources)
    assert len(calls) > 4
    assert kit.snapshot(tree.root) == before


# --- what is refused


def test_edited_after_apply_is_refused_until_dropped(tree, sources):
    before = kit.snapshot(tree.root)
    apply(tree, sources)
    pool = tree.root / "vllm/v1/core/pool.py"
    pool.write_text(pool.read_text() + "# mine\n")
    edited = kit.snapshot(tree.root)
    found = status(tree, sources)
    assert (found.state, EXIT_CODES[found.state]) == ("edited", 3)
    for command in (apply, revert):
        with pytest.raises(PatchError, match="vllm/v1/core/pool.py is edited"):
            command(tree, sources)
    assert kit.snapshot(tree.root) == edited
    revert(tree, sources, discard_edits=True)
    assert kit.snapshot(tree.root) == before


def test_a_damaged_backup_is_refused_before_anything_is_put_back(tree, sources):
    apply(tree, sources)
    old = tree.package / journal.STATE / "old"
    last = max(old.iterdir(), key=lambda path: path.name)
    content = last.read_bytes()
    for damage in (b"junk", content[:-9], zlib.compress(b"another file")):
        last.write_bytes(damage)
        before = kit.snapshot(tree.root)
        with pytest.raises(PatchError, match="(?s)nothing was changed.*install vLLM"):
            revert(tree, sources)
        assert kit.snapshot(tree.root) == before
    last.write_bytes(content)
    assert revert(tree, sources).action == "reverted"


def test_without_backups_a_new_install_gets_back(tmp_path, sources):
    tree = make_tree(tmp_path / "tree")
    apply(tree, sources)
    shutil.rmtree(tree.package / journal.STATE / "old")
    with pytest.raises(PatchError, match="(?s)nothing was changed.*install vLLM"):
        revert(tree, sources)
    kit.write(tree.root, kit.FILES)
    assert revert(tree, sources).action == "reverted"
    assert status(tree, sources).state == "not applied"
    assert not (tree.package / journal.STATE).exists()


def test_removed_after_apply_is_refused_until_dropped(tree, sources):
    before = kit.snapshot(tree.root)
    apply(tree, sources)
    (tree.root / "vllm/v1/core/pool.py").unlink()
    with pytest.raises(PatchError, match="pool.py is missing"):
        revert(tree, sources)
    revert(tree, sources, discard_edits=True)
    assert kit.snapshot(tree.root) == before


RESTORE = (
    f"nothing was changed: put back what is named here as vLLM {kit.RELEASE} has it "
    "(install vLLM again, or git checkout)"
)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, f"vLLM {kit.RELEASE} here has no file {POOL}"),
        ("", "there are 0 definitions of Pool.touch"),
        (kit.POOL + "def broken(:\n", f"{POOL} has a syntax error in line 35"),
    ],
)
def test_a_file_that_is_not_as_it_was_is_to_be_put_back(tree, sources, content, says):
    pool = tree.root / POOL
    pool.unlink()
    if content is not None:
        pool.write_text(content)
    before = kit.snapshot(tree.root)
    with pytest.raises(PatchError) as error:
        apply(tree, sources)
    *lines, advice = error.value.lines
    assert any(says in line for line in lines) and advice == RESTORE
    assert not any("the rules leave" in line for line in lines)
    assert kit.snapshot(tree.root) == before


def test_rules_of_another_release_that_do_not_fit(tmp_path, sources):
    files = {"PKG-INFO": "Version: 99.0.0\n", POOL: "# new\n"}
    tree = kit.make_tree(tmp_path / "tree", **files)
    says = f"the rules for {kit.RELEASE} do not fit vLLM 99.0.0"
    with pytest.raises(PatchError, match=says):
        apply(tree, sources, kit.RELEASE)


def test_a_folder_where_the_new_file_belongs(tree, sources):
    module = tree.root / "vllm/v1/core/segmented.py"
    module.mkdir()
    before = kit.snapshot(tree.root)
    with pytest.raises(PatchError, match=f"{module} is in the way: move it away"):
        apply(tree, sources)
    assert kit.snapshot(tree.root) == before


def test_a_locally_modified_file_whose_rule_no_longer_fits(tree, sources):
    pool = tree.root / "vllm/v1/core/pool.py"
    pool.write_text(kit.POOL.replace("Queue(blocks)", "Other(blocks)"))
    before = kit.snapshot(tree.root)
    with pytest.raises(PatchError) as error:
        apply(tree, sources)
    line, advice = error.value.lines
    assert advice == RESTORE
    assert line.startswith("vllm/v1/core/pool.rules.yaml: rule 'make-segmented' on ")
    assert line.endswith(
        f"vllm/v1/core/pool.py (Pool.__init__) of vLLM {kit.RELEASE}: "
        "matches 0 places, must be exactly one"
    )
    assert kit.snapshot(tree.root) == before


def test_a_tree_with_our_module_but_not_our_change(tree, sources):
    (tree.root / "vllm/v1/core/segmented.py").write_text("other = 1\n")
    before = kit.snapshot(tree.root)
    with pytest.raises(PatchError, match="is already there.*: move it away"):
        apply(tree, sources)
    assert kit.snapshot(tree.root) == before


def test_half_of_the_change_by_other_means(tree, sources):
    shutil.copy(sources.root / "vllm/v1/core/segmented.py", tree.root / "vllm/v1/core")
    found = status(tree, sources)
    assert (found.state, found.by) == ("partly", "other")
    before = kit.snapshot(tree.root)
    for command in (apply, revert):
        with pytest.raises(PatchError, match="not make-segmented|make-segmented"):
            command(tree, sources)
    assert kit.snapshot(tree.root) == before


def test_a_rule_that_only_deletes_is_no_sign_of_the_change(tmp_path, tree):
    """On a release that never had what the rule takes away, say."""
    item = "id: drop\nwhy: x\nin: Pool.__init__\nmatch: self.size = $X\nreplace: ''"
    other = "id: add\nwhy: x\nin: touch\nprepend: first()"
    sources = Sources(kit.write(tmp_path / "small", kit.rules(item, other)))
    pool = tree.root / "vllm/v1/core/pool.py"
    pool.write_text(kit.POOL.replace("self.size", "self.length"))
    assert status(tree, sources).state == "not applied"
    with pytest.raises(PatchError, match="'drop'"):
        apply(tree, sources)
    pool.write_text(kit.POOL)
    apply(tree, sources)
    shutil.rmtree(tree.package / journal.STATE)
    found = status(tree, sources)
    assert (found.state, found.by) == ("applied", "other")


def test_a_rule_whose_result_is_in_stock_already_is_told(tmp_path, tree):
    item = "id: vague\nwhy: x\nin: touch\nmatch: block.count += 1\nreplace: block"
    other = "id: add\nwhy: x\nin: touch\nprepend: first()"
    sources = Sources(kit.write(tmp_path / "small", kit.rules(item, other)))
    with pytest.raises(PatchError, match="there is vague, but not add"):
        apply(tree, sources)


def test_a_release_without_any_rule_is_refused(tmp_path, tree):
    rule = "id: a\nwhy: x\nreleases: <0.1\nin: touch\nprepend: first()"
    sources = Sources(kit.write(tmp_path / "small", kit.rules(rule)))
    with pytest.raises(PatchError, match=f"no rule is for vLLM {kit.RELEASE}"):
        apply(tree, sources)


@pytest.mark.parametrize(
    "version, says",
    [
        ("0.22.1", "0.22.1 is not supported: it has no retention mask"),
        (
            "99.0.1.dev7+gabc",
            f"newer than {kit.RELEASE}.*--force-release {kit.RELEASE}",
        ),
        ("0.30.1.dev3", "--force-release 0.30.0"),
        ("0.5.0", "no release known here"),
    ],
)
def test_unknown_versions(tmp_path, sources, version, says):
    tree = kit.make_tree(tmp_path / "tree", **{"PKG-INFO": f"Version: {version}\n"})
    with pytest.raises(PatchError, match=says):
        apply(tree, sources)
    found = status(tree, sources)
    assert found.state == "not applied" and found.release is None and found.notes
    assert apply(tree, sources, kit.RELEASE).action == "applied"
    assert status(tree, sources).state == "applied"
    revert(tree, sources)


def test_a_tree_that_does_not_say_its_version(tree, sources):
    (tree.root / "PKG-INFO").unlink()
    with pytest.raises(PatchError, match="cannot tell the release"):
        apply(tree, sources)
    with pytest.raises(PatchError, match="no rules for it"):
        apply(tree, sources, "0.1")
    apply(tree, sources, kit.RELEASE)
    assert status(tree, sources).state == "applied"
    assert revert(tree, sources).action == "reverted"


def test_symbolic_links_are_refused(tmp_path, tree, sources):
    pool = tree.root / "vllm/v1/core/pool.py"
    pool.rename(tmp_path / "elsewhere.py")
    pool.symlink_to(tmp_path / "elsewhere.py")
    before = kit.snapshot(tree.root)
    with pytest.raises(PatchError, match="pool.py leads over a symbolic link"):
        apply(tree, sources)
    assert kit.snapshot(tree.root) == before
    assert (tmp_path / "elsewhere.py").read_text() == kit.POOL


def test_a_tree_reached_over_a_symbolic_link_is_changed(tmp_path, tree, sources):
    (tmp_path / "link").symlink_to(tree.root)
    apply(open_tree(tmp_path / "link"), sources)
    assert status(tree, sources).state == "applied"


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user can reach."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def without_privileges(function) -> int:
    """Run in a child that is no super-user."""

    def body() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        function()

    return kit.child(body)


@pytest.mark.parametrize("place", ["vllm", "vllm/v1/core", "vllm/v1/core/pool.py"])
def test_read_only_places_are_refused_before_anything_is_written(public_folder, place):
    sources = kit.make_sources(public_folder / "sources")
    tree = kit.make_tree(public_folder / "tree")
    for path in (tree.root, *tree.root.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    (tree.root / place).chmod(0o555)
    before = kit.snapshot(tree.root)

    def refused() -> None:
        with pytest.raises(PatchError, match=f"{place} is read-only"):
            apply(tree, sources)

    assert without_privileges(refused) == 0
    assert kit.snapshot(tree.root) == before


def test_revert_of_a_read_only_place_is_refused(public_folder):
    sources = kit.make_sources(public_folder / "sources")
    tree = kit.make_tree(public_folder / "tree")
    apply(tree, sources)
    for path in (tree.root, *tree.root.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    (tree.root / "vllm/v1/core").chmod(0o555)
    before = kit.snapshot(tree.root)

    def refused() -> None:
        with pytest.raises(PatchError, match="vllm/v1/core is read-only"):
            revert(tree, sources)

    assert without_privileges(refused) == 0
    assert kit.snapshot(tree.root) == before


def test_two_at_once(tree, sources):
    with journal.locked(tree):
        for command in (apply, revert, status):
            with pytest.raises(PatchError, match="another vllm-pr is at work"):
                command(tree, sources)
    with journal.locked(tree, shared=True):
        status(tree, sources)
        with pytest.raises(PatchError, match="another vllm-pr is at work"):
            apply(tree, sources)
    apply(tree, sources)


# --- versions of the change, of vLLM, and byte code


def test_newer_sources_bring_it_up_to_date(tmp_path, tree, sources):
    before = kit.snapshot(tree.root)
    apply(tree, sources)
    newer = kit.make_sources(
        tmp_path / "newer", **{"vllm/v1/core/segmented.py": "# newer\n"}
    )
    found = status(tree, newer)
    assert found.state == "applied" and not found.is_current and found.notes
    assert apply(tree, newer).action == "updated"
    assert (tree.root / "vllm/v1/core/segmented.py").read_text() == "# newer\n"
    revert(tree, newer)
    assert kit.snapshot(tree.root) == before


def test_newer_sources_that_do_not_fit_leave_the_older_in(tmp_path, tree, sources):
    apply(tree, sources)
    once = kit.snapshot(tree.root)
    unfit = kit.POOL_RULES.replace("block.count += 1", "block.count += 2")
    newer = kit.make_sources(
        tmp_path / "newer", **{"vllm/v1/core/pool.rules.yaml": unfit}
    )
    with pytest.raises(PatchError, match="'promote'"):
        apply(tree, newer)
    assert kit.snapshot(tree.root) == once


def test_vllm_installed_anew_over_the_change(tmp_path, sources):
    tree = make_tree(tmp_path / "tree")
    apply(tree, sources)
    kit.write(
        tree.root,
        {
            "PKG-INFO": "Version: 99.1.0\n",
            "vllm/v1/core/pool.py": "# of 99.1.0\n",
            "docs/design/page.md": "# of 99.1.0\n",
            CACHE: b"byte code of 99.1.0",
        },
    )
    found = status(tree, sources)
    assert (found.state, EXIT_CODES[found.state]) == ("reinstalled", 3)
    with pytest.raises(PatchError, match="was put over"):
        apply(tree, sources)
    revert(tree, sources)
    assert (tree.root / "vllm/v1/core/pool.py").read_text() == "# of 99.1.0\n"
    assert (tree.root / CACHE).read_bytes() == b"byte code of 99.1.0"
    assert not (tree.root / "vllm/v1/core/segmented.py").exists()
    assert not (tree.root / "vllm" / journal.STATE).exists()


def test_the_same_release_installed_anew_over_the_change(tree, sources):
    before = kit.snapshot(tree.root, times=False)
    apply(tree, sources)
    kit.write(tree.root, kit.FILES)
    (tree.root / "vllm/v1/core/pool.py").chmod(0o640)
    assert status(tree, sources).state == "partly"
    assert apply(tree, sources).action == "completed"
    revert(tree, sources)
    assert kit.snapshot(tree.root, times=False) == before


def seen_by_python(tree: Tree, write_cache: bool = True) -> str:
    """What a fresh interpreter runs from the tree."""
    program = "from vllm.v1.core.pool import Pool; print(Pool([0, 1]).usage)"
    flags = [] if write_cache else ["-B"]
    environment = {"PYTHONPATH": str(tree.root), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, *flags, "-c", program],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        cwd=os.sep,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    "mode",
    [
        py_compile.PycInvalidationMode.TIMESTAMP,
        py_compile.PycInvalidationMode.UNCHECKED_HASH,
    ],
)
def test_byte_code_is_never_stale_and_comes_back(tree, sources, mode):
    for path in sorted(tree.package.rglob("*.py")):
        py_compile.compile(str(path), doraise=True, invalidation_mode=mode)
    before = kit.snapshot(tree.root)
    assert seen_by_python(tree) == "1.0"
    apply(tree, sources)
    assert seen_by_python(tree) == "0.5"
    revert(tree, sources)
    assert kit.snapshot(tree.root) == before
    assert seen_by_python(tree) == "1.0"
    assert kit.snapshot(tree.root) == before


def test_byte_code_of_the_change_goes_with_it(tree, sources):
    before = kit.snapshot(tree.root)
    apply(tree, sources)
    assert seen_by_python(tree) == "0.5"
    revert(tree, sources)
    left = changed_paths(before, kit.snapshot(tree.root))
    assert not any("pool" in name or "segmented" in name for name in left)
    assert seen_by_python(tree, write_cache=False) == "1.0"


def test_an_apply_within_the_second_of_the_install(tree, sources, monkeypatch):
    """Python tells byte code by whole seconds and size: both may be equal."""
    pool = tree.root / "vllm/v1/core/pool.py"
    old = pool.stat().st_mtime_ns
    monkeypatch.setattr(journal.time, "time_ns", lambda: old + 5)
    apply(tree, sources)
    assert pool.stat().st_mtime_ns // 10**9 != old // 10**9


# --- the installed package


def test_round_trip_on_a_copy_of_the_installed_package(tmp_path):
    """The real rules on the real package, without its shared libraries."""
    installed = installed_tree()
    root = tmp_path / "site"
    shutil.copytree(
        installed.package / "v1", root / "vllm" / "v1", copy_function=shutil.copy2
    )
    sources = Sources()
    paths = [edit.edits for edit in sources.edits] + ["vllm/__init__.py"]
    for name in [*paths, "vllm/_version.py"]:
        source = installed.root / name
        if source.exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, root / name)
    tree = open_tree(root)
    before = kit.snapshot(root)
    assert status(tree, sources).state == "not applied"
    outcome = apply(tree, sources)
    assert "vllm/v1/core/free_block_queue.py" in outcome.files
    assert status(tree, sources).state == "applied"
    changed = changed_paths(before, without_state(kit.snapshot(root)))
    caches = {name for name in changed if name.endswith(".pyc")}
    assert changed - caches == set(outcome.files)
    revert(tree, sources)
    assert kit.snapshot(root) == before
