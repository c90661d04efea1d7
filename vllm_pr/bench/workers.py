# SPDX-License-Identifier: Apache-2.0
"""Worker processes of both variants, and jobs spread over them."""

import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from vllm_pr.bench.worker import NEXT
from vllm_pr.patching.trees import changed_tree

STOCK, CHANGED = "stock", "changed"
VARIANTS = (STOCK, CHANGED)
BUILD = Path(__file__).resolve().parents[2] / "build" / "bench"

_NUMBERS = itertools.count()

Job = tuple[str, dict[str, Any]]


class BenchError(RuntimeError):
    """A measurement failed; the message says which and where the log is."""


class Worker:
    """One process that measures one variant.

    Args:
        tree: folder to put first on ``PYTHONPATH``, None for the installed vLLM.
        log: where its log goes.
    """

    def __init__(self, tree: Path | None, log: Path) -> None:
        dropped = ("VLLM_", "PYTHONPATH", "PYTHONHASHSEED")
        env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        env |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
        if tree is not None:
            env["PYTHONPATH"] = str(tree)
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm_pr.bench.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=env,
                encoding="utf-8",
            )

    def run(self, job: str, **keywords: Any) -> Any:
        """Run one job and return its one result.

        Raises:
            BenchError: the job failed, or the process ended.
        """
        return next(self.steps(job, **keywords))

    def steps(self, job: str, **keywords: Any) -> Iterator[Any]:
        """Run one job step by step: it goes on only when the next result is asked for.

        Raises:
            BenchError: the job failed, or the process ended.
        """
        self._send(json.dumps({"job": job, **keywords}))
        try:
            while "end" not in (answer := self._answer(job, keywords)):
                yield answer["result"]
                self._send(NEXT)
        except GeneratorExit:
            self._send("stop")

    def _send(self, line: str) -> None:
        assert self._process.stdin
        with suppress(OSError):  # It has ended: no answer will say so.
            print(line, file=self._process.stdin, flush=True)

    def _answer(self, job: str, keywords: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the worker ended"}
        if "error" in answer:
            raise BenchError(f"{job} {keywords}: {answer['error']} (log: {self._log})")
        return answer

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


class Workers:
    """The workers of a run, started when they are first needed.

    Args:
        trees: folder of each variant, by name; default: the installed vLLM and its
            changed copy.
        jobs: how many may be busy at once.
    """

    def __init__(
        self, trees: dict[str, Path | None] | None = None, jobs: int = 1
    ) -> None:
        self.jobs = jobs
        self._trees = trees or {STOCK: None, CHANGED: changed_tree()}
        self._idle: defaultdict[str, SimpleQueue[Worker]] = defaultdict(SimpleQueue)
        self._started: list[Worker] = []
        BUILD.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._started:
            worker.stop()

    def fresh(self) -> "Workers":
        """Others like these: none of their processes has run a job."""
        return Workers(self._trees)

    @contextmanager
    def worker(self, variant: str) -> Iterator[Worker]:
        """A worker of ``variant`` that nobody else uses meanwhile."""
        idle = self._idle[variant]
        worker = self._start(variant) if idle.empty() else idle.get()
        try:
            yield worker
        finally:
            idle.put(worker)

    def run(self, variant: str, job: str, **keywords: Any) -> Any:
        """Run one job on a worker of ``variant``.

        Raises:
            BenchError: the job failed.
        """
        with self.worker(variant) as worker:
            return worker.run(job, **keywords)

    def run_all(
        self, job: str, jobs: Iterable[Job], done: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[Job, Any]]:
        """Run ``job`` with each (variant, keywords), several at once.

        Args:
            job: name of the job.
            jobs: variant and keywords of each.
            done: called after each.

        Yields:
            Each with its result, as they finish.

        Raises:
            BenchError: one failed; those not yet begun are dropped.
        """
        with ThreadPoolExecutor(self.jobs) as threads:
            futures = {
                threads.submit(self.run, variant, job, **keywords): (variant, keywords)
                for variant, keywords in jobs
            }
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
                    done()
            finally:
                threads.shutdown(cancel_futures=True)

    def _start(self, variant: str) -> Worker:
        log = BUILD / f"worker-{variant}-{next(_NUMBERS)}.log"
        worker = Worker(self._trees[variant], log)
        self._started.append(worker)
        return worker
