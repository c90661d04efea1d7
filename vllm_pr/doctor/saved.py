# SPDX-License-Identifier: Apache-2.0
"""A saved ``/metrics`` text explained: what its configuration and counters tell."""

from pathlib import Path

from vllm_pr.doctor import remedies, report
from vllm_pr.doctor.errors import DoctorError
from vllm_pr.doctor.evidence import Evidence, Server
from vllm_pr.doctor.metrics import Snapshot, describe, parse
from vllm_pr.doctor.verdicts import (
    Finding,
    caching_off,
    exit_status,
    one_session_pool,
)

OFTEN = 0.01


def explain_file(path: Path, release: str | None, json_file: Path | None) -> int:
    """Explain the file and return the exit status: 1 for a fault in it, else 2.

    A file cannot prove health: nothing was measured.

    Raises:
        DoctorError: It cannot be read, or is no metrics text of vLLM.
    """
    snapshot = _read(path)
    server = Server(url=str(path), version=release)
    describe(snapshot, server)
    evidence = Evidence(server)
    evidence.traffic.preemptions_before = int(snapshot.total["preemptions"])
    findings = examine_saved(evidence, snapshot)
    out = report.console()
    report.show_server(out, server)
    report.show(out, evidence, findings)
    if json_file:
        json_file.write_bytes(report.as_json(evidence, findings))
    return exit_status(findings)


def _read(path: Path) -> Snapshot:
    try:
        snapshot = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DoctorError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise DoctorError(f"{path} is no Prometheus text: {error}") from None
    if not snapshot.vllm:
        raise DoctorError(f"{path} has no metric of vLLM: save the server's /metrics")
    return snapshot


def examine_saved(evidence: Evidence, snapshot: Snapshot) -> list[Finding]:
    """Findings from configuration and counters alone, faults first."""
    checks = (
        caching_off(evidence),
        preempted_often(evidence, snapshot),
        retention_suspected(evidence),
        one_session_pool(evidence),
        since_start(snapshot),
    )
    order = {"fault": 0, "unsure": 1, "note": 2}
    return sorted(filter(None, checks), key=lambda f: order[f.severity])


def preempted_often(evidence: Evidence, snapshot: Snapshot) -> Finding | None:
    """Preemptions since the start; a fault from one in a hundred requests on."""
    preempted = evidence.traffic.preemptions_before
    finished = int(snapshot.total["finished"])
    if not preempted:
        return None
    often = preempted > OFTEN * finished
    return Finding(
        "preemption",
        "fault" if often else "note",
        "Running requests are preempted",
        "More requests run than the pool can hold: one is thrown out, its blocks are "
        "reused, and it is computed again later.",
        [f"{preempted} preemptions, {finished} requests finished since the start"],
        remedies.preempted(),
    )


def retention_suspected(evidence: Evidence) -> Finding | None:
    """What the retention interval means for a model with sliding windows."""
    server = evidence.server
    dense = remedies.dense_checkpoints(server)
    if server.caching is False or server.dense_group_only or dense is None:
        return None
    unless = (
        ""
        if server.dense_group_only is False
        else ("if the model has sliding-window layers, ")
    )
    if dense:
        return Finding(
            "session-flush",
            "unsure",
            "Switching sessions may flush the cache",
            f"With checkpoints everywhere, {unless}other sessions' prefill can turn "
            "the "
            "free list over at any pool usage, unless this change is applied.",
            remedies.release_lines(server),
            remedies.measure(),
        )
    return Finding(
        "sparse-retention",
        "unsure",
        "First branches and second sessions may miss",
        f"With this interval, {unless}only the end of a prompt and junctions seen "
        "before "
        "are kept in them.",
        remedies.release_lines(server),
        remedies.measure(),
    )


def since_start(snapshot: Snapshot) -> Finding:
    """Hit rate since the server's start, and that a file is no measurement."""
    queries, hits = (int(snapshot.total[name]) for name in ("queries", "hits"))
    rate = (
        f"{hits / queries:.1%} of {queries} prompt tokens" if queries else "no prompt"
    )
    return Finding(
        "not-measured",
        "unsure",
        "A file shows the configuration and sums, not what a session sees",
        "A low rate since the start can be a fault or the workload; only requests "
        "tell.",
        [f"served from the prefix cache since the start: {rate}"],
        remedies.measure(),
    )
