# SPDX-License-Identifier: Apache-2.0
"""A process per test file without an import of vLLM per test file.

``python -m vllm_pr.upstream.forks`` imports vLLM once, then forks for every request:
one JSON object a line on stdin, the child's process id and then its wait status on
stdout. A child is a session leader, so that whoever asked can end all that it started.
"""

import contextlib
import gc
import json
import os
import signal
import sys

from vllm_pr.engine.processes import die_with_parent
from vllm_pr.upstream.recorder import RECORD


def main() -> None:
    """Serve requests until stdin ends."""
    die_with_parent(signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    _preload()
    print("ready", file=answers)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            os._exit(_run_tests(**json.loads(line)))
        print(child, file=answers)
        print(os.waitpid(child, 0)[1], file=answers)


def _preload() -> None:
    """Import what every test process imports, but no module of the tests."""
    sys.path.insert(0, os.getcwd())
    with contextlib.suppress(Exception):
        import tests.conftest  # noqa: F401
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    import pytest  # noqa: F401

    # Upstream thaws and collects garbage after every test: a second each, over what
    # is imported here.
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None


def _run_tests(arguments: list[str], log: str, record: str) -> int:
    die_with_parent(signal.SIGKILL)
    os.setsid()
    with open(os.devnull) as nothing, open(log, "ab") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ[RECORD] = record
    import pytest

    return int(pytest.main(arguments))


if __name__ == "__main__":
    main()
