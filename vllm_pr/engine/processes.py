# SPDX-License-Identifier: Apache-2.0
"""Engine processes: started in a session of their own, and stopped for certain."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from vllm_pr.engine.models import BUILD

PR_SET_PDEATHSIG = 1


class EngineError(RuntimeError):
    """An engine did not start, or died; one line that says why and where to look."""


def die_with_parent(sent: int = signal.SIGTERM) -> None:
    """Have the kernel send ``sent`` to this process when its parent dies (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, sent)


def start(
    module: str, arguments: list[str], env: dict[str, str], log: Path, **popen
) -> subprocess.Popen:
    """Run ``python -m module`` in its own session, its output in ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=env,
            cwd=BUILD,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **popen,
        )


def stop(process: subprocess.Popen, patience: float = 15.0) -> None:
    """End ``process`` and all it started.

    Args:
        process: What ``start`` returned.
        patience: Seconds between the polite signal and the final one.
    """
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def log_path(*words: object) -> Path:
    """A log file of its own under ``build/``."""
    name = "-".join(map(str, (*words, os.getpid(), time.monotonic_ns() % 10**9)))
    return BUILD / "logs" / f"{name}.log"


def last_error(log: Path) -> str:
    """The line of ``log`` that names the first exception, or its last line."""
    raised = [x for x in _lines(log) if re.match(r"(\w+\.)*\w*(Error|Exception): ", x)]
    return raised[0] if raised else last_line(log)


def last_line(log: Path) -> str:
    """The last line of ``log`` that says something."""
    return next(reversed(_lines(log)), "nothing in the log")


def _lines(log: Path) -> list[str]:
    """Lines of ``log`` that are not empty, without vLLM's process, time and place."""
    prefix = re.compile(r"^\([\w-]+ pid=\d+\) ?(\w+ [\d: -]+\[[^]]*\] ?)?")
    text = log.read_text(encoding="utf-8", errors="replace")
    return [x for x in (prefix.sub("", y).strip() for y in text.splitlines()) if x]
