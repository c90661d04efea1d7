# SPDX-License-Identifier: Apache-2.0
"""Time to first token on the real engine, under a session-switch load.

The client is ``vllm bench serve``; its ``timed_trace`` data set takes prompts as lists
of chunk ids, where equal ids are equal tokens.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from vllm_pr.bench.workers import BUILD, BenchError
from vllm_pr.engine.models import model_folder, tiny_model
from vllm_pr.engine.server import Server, serve
from vllm_pr.engine.variants import plan_launch, variant_named

VARIANTS = ("stock-none", "stock-default", "changed")
USERS = (1, 4, 8)
CHUNK = 16  # tokens of a chunk id
_CLIENT = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\n"
    "add_cli_args(parser)\n"
    "main(parser.parse_args())\n"
)


@dataclass(frozen=True)
class Load:
    """Chats that users switch between, and the pool that serves them.

    However many users there are, they have the same chats between them: so the same
    pool fits, and only the number of requests in flight differs.

    Attributes:
        sessions: chats, of all users together.
        visits: requests to each.
        opening: tokens of a chat's first prompt.
        turn: tokens that each further prompt adds.
        blocks: size of the pool, in blocks: what all chats keep for their return fits,
            and not all checkpoints of them.
        output: tokens of an answer.
    """

    sessions: int
    visits: int
    opening: int
    turn: int
    blocks: int
    output: int = 4


LOADS = {
    "gemma3-tiny": Load(sessions=16, visits=3, opening=1_504, turn=96, blocks=1_500),
    "dsv4-tiny": Load(sessions=8, visits=2, opening=1_024, turn=96, blocks=700),
}


@dataclass(frozen=True)
class Ttft:
    """Result of one load on one variant; seconds.

    Attributes:
        model: the tiny model.
        variant: the setting, see `vllm_pr.engine.variants`.
        users: requests in flight at once.
        requests: how many were sent.
        p50: median time to first token.
        p99: 99th percentile of it.
        hit_rate: share of prompt tokens served from the prefix cache.
    """

    model: str
    variant: str
    users: int
    requests: int
    p50: float
    p99: float
    hit_rate: float


def trace_lines(load: Load) -> Iterator[str]:
    """The load as a trace: each request is to another chat than the one before it."""
    for visit in range(load.visits):
        for session in range(load.sessions):
            tokens = load.opening + visit * load.turn
            first = 1_000 * session
            yield json.dumps(
                {
                    "timestamp": 0,
                    "input_length": tokens,
                    "output_length": load.output,
                    "hash_ids": list(range(first, first + tokens // CHUNK)),
                }
            )


def measure_ttft(
    model: str,
    users: tuple[int, ...] = USERS,
    load: Load | None = None,
    on_wait: Callable[[float, str], None] | None = None,
) -> Iterator[Ttft]:
    """Serve the load on every variant with every number of users.

    One server a variant; its prefix cache is emptied before each load.

    Args:
        model: a tiny model.
        users: numbers of users.
        load: the chats; default: the model's own, see `LOADS`.
        on_wait: as for `vllm_pr.engine.server.serve`.

    Raises:
        EngineError: a server did not start.
        BenchError: the client failed.
    """
    load = load or LOADS[model]
    for variant in VARIANTS:
        with serve(model, variant, blocks=load.blocks, on_wait=on_wait) as server:
            for count in users:
                yield _measure(server, model, variant, count, load)


def _measure(server: Server, model: str, variant: str, users: int, load: Load) -> Ttft:
    name = f"{model}-{variant}-{users}"
    trace = BUILD / f"load-{name}.jsonl"
    BUILD.mkdir(parents=True, exist_ok=True)
    lines = list(trace_lines(load))
    trace.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with httpx.Client(trust_env=False, base_url=server.url, timeout=60) as client:
        client.post("/reset_prefix_cache").raise_for_status()
        before = _prefix_cache_counts(client)
        result = _run_client(server, model, trace, users, len(lines), name)
        queries, hits = (
            after - b
            for after, b in zip(_prefix_cache_counts(client), before, strict=True)
        )
    return Ttft(
        model,
        variant,
        users,
        result["completed"],
        result["p50_ttft_ms"] / 1000,
        result["p99_ttft_ms"] / 1000,
        hits / queries,
    )


def _run_client(
    server: Server, model: str, trace: Path, users: int, requests: int, name: str
) -> dict:
    result = BUILD / f"result-{name}.json"
    log = BUILD / f"client-{name}.log"
    arguments = {
        "--base-url": server.url,
        "--endpoint": "/v1/completions",
        "--model": server.model,
        "--tokenizer": str(model_folder(model)),
        "--dataset-name": "timed_trace",
        "--dataset-path": str(trace),
        "--timed-trace-chunk-hash-size": CHUNK,
        "--num-prompts": requests,
        "--max-concurrency": users,
        "--percentile-metrics": "ttft",
        "--metric-percentiles": "50,99",
        "--result-dir": str(result.parent),
        "--result-filename": result.name,
        "--seed": 0,
    }
    words = [str(word) for pair in arguments.items() for word in pair]
    launch = plan_launch(tiny_model(model), variant_named("stock-default"))
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-c", _CLIENT, *words, "--save-result", "--ignore-eos"],
            env={**launch.env, "PYTHONHASHSEED": "0"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if done.returncode or not result.is_file():
        raise BenchError(f"vllm bench serve failed for {name} (log: {log})")
    found = json.loads(result.read_text(encoding="utf-8"))
    if found["completed"] != requests:
        raise BenchError(
            f"{name}: {found['completed']} of {requests} requests were served "
            f"(log: {log})"
        )
    return found


def _prefix_cache_counts(client: httpx.Client) -> tuple[float, float]:
    """Prompt tokens looked up and found so far."""
    totals = {"queries": 0.0, "hits": 0.0}
    for line in client.get("/metrics").text.splitlines():
        for name in totals:
            if line.startswith(f"vllm:prefix_cache_{name}_total"):
                totals[name] += float(line.rsplit(" ", 1)[1])
    return totals["queries"], totals["hits"]
