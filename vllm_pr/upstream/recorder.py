# SPDX-License-Identifier: Apache-2.0
"""Pytest plugin that writes each outcome at once, so that a crash loses no result.

Loaded in upstream's test process with ``-p``; ``VLLM_PR_RECORD`` names the file. One
JSON object a line: ``collected`` (all test ids), ``started`` (one id), ``ended`` (one
id with its status and reason) and ``broken`` (a file or folder that did not import).
"""

import json
import os
from pathlib import Path

RECORD = "VLLM_PR_RECORD"
_WORSE = {"passed": 0, "skipped": 1, "failed": 2}


class Recorder:
    """Writes one line per event to ``path``."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._pid = os.getpid()
        self._status: dict[str, str] = {}

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self._write(broken=report.nodeid, reason=_text(report))
        elif report.skipped:
            self._write(broken=report.nodeid, skipped=True, reason=_text(report))

    def pytest_collection_finish(self, session) -> None:
        self._write(collected=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(started=nodeid)
        self._status[nodeid] = "passed"

    def pytest_runtest_logreport(self, report) -> None:
        before = self._status.get(report.nodeid, "passed")
        if _WORSE[report.outcome] > _WORSE[before]:
            self._status[report.nodeid] = report.outcome
            self._write(reason=_text(report), of=report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(ended=nodeid, status=self._status[nodeid])

    def _write(self, **event) -> None:
        if os.getpid() == self._pid:
            self._file.write(json.dumps(event) + "\n")


def _text(report) -> str:
    return str(report.longrepr)[-20_000:]


def pytest_configure(config) -> None:
    config.pluginmanager.register(Recorder(Path(os.environ[RECORD])), "recorder")
