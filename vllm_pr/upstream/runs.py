# SPDX-License-Identifier: Apache-2.0
"""One test file in a process of its own; whatever it does, the outcomes come back."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from vllm_pr.upstream.recorder import RECORD
from vllm_pr.upstream.sources import Side

TEST_SECONDS = 300
STALL_SECONDS = 600
FILE_SECONDS = 3600


@dataclass(frozen=True)
class Outcome:
    """What became of one test.

    Attributes:
        status: "passed", "failed" or "skipped".
        reason: End of the failure's text, or the reason of the skip.
    """

    status: str
    reason: str = ""


@dataclass
class Record:
    """What the recorder wrote during one process."""

    collected: list[str] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    unfinished: str | None = None


def run_file(side: Side, file: str, log: Path) -> dict[str, Outcome]:
    """Run one test file on one side.

    A process that dies or hangs costs the test it was in, which counts as failed; the
    rest of the file goes on in another process. A file that does not import is one
    outcome, under the file's own name.

    Args:
        side: Where to run it.
        file: Path relative to the side's root.
        log: Receives the output of every process.

    Returns:
        An outcome for each test id.
    """
    outcomes: dict[str, Outcome] = {}
    deadline = time.monotonic() + FILE_SECONDS
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    chosen = [file]
    while chosen:
        record, ended = _run(side, chosen, log, deadline)
        outcomes |= record.outcomes
        if record.unfinished:
            outcomes[record.unfinished] = Outcome("failed", ended)
        chosen = [test for test in record.collected if test not in outcomes]
        if chosen and (time.monotonic() > deadline or not record.unfinished):
            outcomes |= dict.fromkeys(chosen, Outcome("failed", f"not run: {ended}"))
            break
    return outcomes or {file: Outcome("failed", f"no test ran: {ended}")}


def _run(
    side: Side, tests: list[str], log: Path, deadline: float
) -> tuple[Record, str]:
    path = log.with_suffix(".jsonl")
    path.unlink(missing_ok=True)
    path.touch()
    arguments = log.with_suffix(".args")
    arguments.write_text("\n".join(tests), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "vllm_pr.upstream.recorder"]
    # Reruns would hide what is flaky.
    command += ["-p", "no:rerunfailures", "-p", "no:cacheprovider", "-q"]
    command += [f"--timeout={TEST_SECONDS}", "--timeout-method=signal"]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, f"@{arguments}"],
            cwd=side.root,
            env={**side.env, RECORD: str(path)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended = _wait(process, path, deadline)
    return read_record(path), ended


def _wait(process: subprocess.Popen, record: Path, deadline: float) -> str:
    """Wait for the end of a process that makes progress; say how it ended."""
    try:
        while process.poll() is None:
            if time.time() - record.stat().st_mtime > STALL_SECONDS:
                return f"timed out: nothing happened for {STALL_SECONDS} s"
            if time.monotonic() > deadline:
                return f"timed out: {FILE_SECONDS} s for one file"
            time.sleep(0.2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    code = process.returncode
    return f"process died: signal {-code}" if code < 0 else f"process ended: {code}"


def read_record(path: Path) -> Record:
    """Read what the recorder wrote."""
    record = Record()
    reasons: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if "collected" in event:
            record.collected = event["collected"]
        elif "broken" in event:
            status = "skipped" if event.get("skipped") else "failed"
            record.outcomes[event["broken"]] = Outcome(status, event["reason"])
        elif "started" in event:
            record.unfinished = event["started"]
        elif "of" in event:
            reasons[event["of"]] = event["reason"]
        elif "ended" in event:
            test = event["ended"]
            record.outcomes[test] = Outcome(event["status"], reasons.get(test, ""))
            record.unfinished = None
    return record
