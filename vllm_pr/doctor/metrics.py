# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``/metrics`` text, reduced to what the doctor needs."""

import math
from collections import defaultdict
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from vllm_pr.doctor.evidence import Server

_COUNTERS = {
    "vllm:prefix_cache_queries_total": "queries",
    "vllm:prefix_cache_hits_total": "hits",
    "vllm:external_prefix_cache_hits_total": "external_hits",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:request_success_total": "finished",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
}


@dataclass
class Snapshot:
    """One reading of the metrics.

    Attributes:
        vllm: Whether any of vLLM's metrics is there.
        total: Counters and gauges by short name, summed over engines.
        by_engine: Prefix-cache queries in tokens by engine.
        usage: Largest share of an engine's pool in use, 0 to 1; None when not there.
        config: Labels of the cache configuration of the first engine.
        engines: Number of engines that report a cache configuration.
        spec_decode: Whether speculative decoding counters exist.
        started: Start time of the server process, seconds since the epoch.
    """

    vllm: bool = False
    total: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_engine: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    usage: float | None = None
    config: dict[str, str] = field(default_factory=dict)
    engines: int = 0
    spec_decode: bool = False
    started: float | None = None

    def since(self, earlier: "Snapshot", name: str) -> int:
        """How much the counter ``name`` grew since ``earlier``."""
        return round(self.total[name] - earlier.total[name])

    def moved(self, earlier: "Snapshot") -> list[str]:
        """The engines that looked up a prompt since ``earlier``."""
        return sorted(
            engine
            for engine, queries in self.by_engine.items()
            if queries > earlier.by_engine.get(engine, 0.0)
        )


_WANTED = (
    *_COUNTERS,
    "vllm:cache_config_info",
    "vllm:kv_cache_usage_perc",
    "vllm:spec_decode",
    "process_start_time_seconds",
)


def parse_wanted(text: str) -> Snapshot:
    """`parse` of the lines that matter: a hundredth of the time on a full reading."""
    lines = (line for line in text.splitlines() if line.startswith(_WANTED))
    return parse("\n".join(lines) + "\n")


def parse(text: str) -> Snapshot:
    """Read Prometheus text.

    Raises:
        ValueError: It is not in Prometheus' text format.
    """
    snapshot = Snapshot()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            _take(snapshot, sample.name, sample.labels, sample.value)
    return snapshot


def _take(snapshot: Snapshot, name: str, labels: dict, value: float) -> None:
    snapshot.vllm |= name.startswith("vllm:")
    if not math.isfinite(value):
        return
    if name == "process_start_time_seconds":
        snapshot.started = value
    if short := _COUNTERS.get(name):
        snapshot.total[short] += value
    if name == "vllm:prefix_cache_queries_total":
        snapshot.by_engine[labels.get("engine", "0")] += value
    elif name == "vllm:kv_cache_usage_perc":
        snapshot.usage = max(snapshot.usage or 0.0, value)
    elif name == "vllm:cache_config_info":
        snapshot.config = snapshot.config or dict(labels)
        snapshot.engines += 1
    elif name.startswith("vllm:spec_decode"):
        snapshot.spec_decode = True


def describe(snapshot: Snapshot, server: Server) -> None:
    """Fill ``server`` with what the metrics say about its cache."""
    config = snapshot.config
    server.metrics = snapshot.vllm
    if not snapshot.vllm:
        return
    server.engine = "vllm"
    server.spec_decode = snapshot.spec_decode
    server.engines = max(1, snapshot.engines)
    server.caching = {"True": True, "False": False}.get(
        config.get("enable_prefix_caching", "")
    )
    server.blocks = _number(config, "num_gpu_blocks")
    server.block_size = _number(config, "effective_attention_block_size") or _number(
        config, "block_size"
    )
    server.capacity_tokens = _number(config, "kv_cache_size_tokens")
    server.alignment = _number(config, "cache_hit_alignment_tokens")
    interval = config.get("prefix_cache_retention_interval")
    server.interval = int(interval) if (interval or "").isdecimal() else None
    if interval == "None":
        server.interval = "None"
    if server.blocks and server.block_size and server.capacity_tokens:
        all_tokens = server.blocks * server.block_size
        server.dense_group_only = server.capacity_tokens > 0.98 * all_tokens


def _number(labels: dict[str, str], name: str) -> int | None:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None
