# SPDX-License-Identifier: Apache-2.0
"""One test file in a process of its own; whatever it does, the outcomes come back."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

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


class Runner:
    """Runs the test files of one side, each in a process of its own.

    Args:
        side: Where to run them.
        number: Tells this one apart from others of the same side.
    """

    def __init__(self, side: Side, number: int = 0) -> None:
        self._side = side
        self._log = side.logs / f"forks-{number}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._forks: subprocess.Popen | None = None

    def close(self) -> None:
        """End the process that forks."""
        if self._forks:
            self._forks.kill()
            self._forks.wait()
            self._forks = None

    def run(self, file: str) -> dict[str, Outcome]:
        """Run one test file.

        A process that dies or hangs costs the test it was in, which counts as failed;
        the rest of the file goes on in another process. A file that does not import is
        one outcome, under the file's own name.

        Args:
            file: Path relative to the side's root.

        Returns:
            An outcome for each test id.
        """
        outcomes: dict[str, Outcome] = {}
        deadline = time.monotonic() + FILE_SECONDS
        name = file.removeprefix("tests/").removesuffix(".py").replace("/", ".")
        log = self._side.logs / f"{name}.log"
        log.unlink(missing_ok=True)
        chosen = [file]
        while chosen:
            record, ended = self._run(chosen, log, deadline)
            outcomes |= record.outcomes
            if record.unfinished:
                outcomes[record.unfinished] = Outcome("failed", ended)
            chosen = [test for test in record.collected if test not in outcomes]
            if chosen and (time.monotonic() > deadline or not record.unfinished):
                rest = Outcome("failed", f"not run: {ended}")
                outcomes |= dict.fromkeys(chosen, rest)
                break
        return outcomes or {file: Outcome("failed", f"no test ran: {ended}")}

    def _run(self, tests: list[str], log: Path, deadline: float) -> tuple[Record, str]:
        record = log.with_suffix(".jsonl")
        record.unlink(missing_ok=True)
        record.touch()
        chosen = log.with_suffix(".args")
        chosen.write_text("\n".join(tests), encoding="utf-8")
        # Reruns would hide what is flaky.
        arguments = ["-p", "vllm_pr.upstream.recorder", "-p", "no:rerunfailures"]
        arguments += ["-p", "no:cacheprovider", "-q", f"@{chosen}"]
        arguments += [f"--timeout={TEST_SECONDS}", "--timeout-method=signal"]
        request = {"arguments": arguments, "log": str(log), "record": str(record)}
        forks = self._started()
        print(json.dumps(request), file=forks.stdin, flush=True)
        why = _wait(int(forks.stdout.readline()), record, deadline)
        code = os.waitstatus_to_exitcode(int(forks.stdout.readline()))
        ended = f"process died: signal {-code}" if code < 0 else f"exit code {code}"
        return read_record(record), why or ended

    def _started(self) -> subprocess.Popen:
        if self._forks:
            return self._forks
        with self._log.open("wb") as output:
            self._forks = subprocess.Popen(
                [sys.executable, "-m", "vllm_pr.upstream.forks"],
                cwd=self._side.root,
                env=self._side.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        if self._forks.stdout.readline().strip() != "ready":
            self.close()
            raise RuntimeError(f"nothing starts on {self._side.name}: see {self._log}")
        return self._forks


def _wait(child: int, record: Path, deadline: float) -> str:
    """Wait for the end of a process that makes progress; say why it was ended."""
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(child)
        try:
            while not select.select([ended], [], [], 1.0)[0]:
                if time.time() - record.stat().st_mtime > STALL_SECONDS:
                    return f"timed out: nothing happened for {STALL_SECONDS} s"
                if time.monotonic() > deadline:
                    return f"timed out: {FILE_SECONDS} s for one file"
        finally:
            os.close(ended)
            os.killpg(child, signal.SIGKILL)
    return ""


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
