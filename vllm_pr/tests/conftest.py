# SPDX-License-Identifier: Apache-2.0
"""The tests of the harness run on *changed*; they record the figures for docs."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_pr.proof import FIGURES


def _use_changed_tree() -> None:
    """Put the changed copy first on the path of this process and its children."""
    if "vllm" in sys.modules:
        return
    from vllm_pr.patching.trees import changed_tree

    tree = str(changed_tree())
    if tree not in sys.path:
        sys.path.insert(0, tree)


_use_changed_tree()
# A shell that starts this in the background has it ignore SIGINT, which the commands
# that tests interrupt would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def figure() -> Iterator[Callable[[str, object], None]]:
    """Record a figure of the proof: ``figure(name, value)``.

    All of them are written as one JSON object to the file that ``VLLM_PR_FIGURES``
    names, when it is set; ``vllm-pr proof`` sets it.
    """
    figures: dict[str, object] = {}

    def record(name: str, value: object) -> None:
        assert name not in figures, f"two figures are called {name!r}"
        figures[name] = value
        print(f"{name}: {value}")

    yield record
    if path := os.environ.get(FIGURES):
        Path(path).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
