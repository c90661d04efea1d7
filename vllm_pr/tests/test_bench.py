# SPDX-License-Identifier: Apache-2.0
"""The benchmarks measure what they say."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_pr.bench import sweep
from vllm_pr.bench.cost import (
    measure_cost,
    measure_memory,
    plans,
    queues_above_aims,
)
from vllm_pr.bench.hashing import PieceHasher, merged
from vllm_pr.bench.plots import write_plots
from vllm_pr.bench.replay import Replay
from vllm_pr.bench.report import hit_tables
from vllm_pr.bench.scale import blocks_to_hold
from vllm_pr.bench.sweep import Point
from vllm_pr.bench.trace import TraceError, read_trace
from vllm_pr.bench.ttft import CHUNK, Load, trace_lines
from vllm_pr.bench.workers import CHANGED, STOCK, BenchError, Workers
from vllm_pr.bench.workloads import WORKLOADS, Chat, cut_at
from vllm_pr.cli import app
from vllm_pr.driver import Driver
from vllm_pr.scenarios import (
    DEEPSEEK_V4_FLASH,
    GEMMA,
    GEOMETRIES,
    SCENARIOS,
    Ask,
    Text,
    token_ids,
)

TEXTS = st.lists(
    st.builds(
        Text,
        key=st.sampled_from("ab"),
        tokens=st.integers(0, 9),
        start=st.integers(0, 3),
    ),
    max_size=4,
)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as running:
        yield running


def tokens_of(texts: list[Text]) -> list[tuple[str, int]]:
    return [(t.key, t.start + i) for t in texts for i in range(t.tokens)]


@settings(max_examples=500, deadline=None)
@given(one=TEXTS, other=TEXTS, block_size=st.integers(1, 4))
def test_hashes_are_equal_exactly_where_prefixes_are(one, other, block_size):
    hasher = PieceHasher(block_size)
    hashes = [hasher.hashes(merged(texts)) for texts in (one, other)]
    tokens = [tokens_of(texts) for texts in (one, other)]
    assert [len(h) for h in hashes] == [len(t) // block_size for t in tokens]
    for block, pair in enumerate(zip(*hashes, strict=False), 1):
        end = block * block_size
        assert (pair[0] == pair[1]) == (tokens[0][:end] == tokens[1][:end])


@pytest.mark.parametrize("size", [8, 32])
def test_hashes_have_the_asked_length(size):
    hashes = PieceHasher(4, size).hashes([Text("a", 2_000)])
    assert len(set(hashes)) == 500
    assert {len(one) for one in hashes} == {size}


@pytest.mark.parametrize("name", ["branch", "system_prompt", "edit_end"])
def test_replay_hits_what_the_same_tokens_hit(name):
    scenario = SCENARIOS[name]
    replay = Replay(scenario.geometry, scenario.blocks, None)
    driver = Driver(scenario.geometry, scenario.blocks, None)
    for ask in scenario.asks:
        run = driver.run(token_ids(*ask.prompt), token_ids(ask.output))
        assert replay.serve(ask) == run


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_bound_is_what_an_unbounded_pool_serves(geometry):
    asks = WORKLOADS["branches"].asks()[:20]
    served = Replay(geometry, 250_000, None).hit_rate(asks)
    assert served == sweep.upper_bound(asks, geometry)
    assert served > 0.4


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_smallest_pool_holds_the_largest_request(workload, geometry):
    largest = max(workload.asks(), key=lambda ask: ask.prompt_tokens)
    Replay(geometry, workload.blocks[geometry.name][0]).serve(largest)


def test_workloads_are_seeded():
    for workload in WORKLOADS.values():
        assert workload.asks() == workload.asks()
        names = [ask.name for ask in workload.asks()]
        assert len(set(names)) == len(names)


def test_a_chat_repeats_what_was_said():
    chat = Chat("c", Text("opening", 5))
    first, second = chat.ask(2, 3), chat.ask(2, 3)
    assert second.prompt[: len(first.prompt) + 1] == (*first.prompt, first.output)
    assert second.prompt_tokens == 5 + 2 + 3 + 2


def test_a_prompt_is_cut_inside_a_text():
    pieces = (Text("a", 5), Text("b", 5, 2))
    assert list(cut_at(pieces, 7)) == [Text("a", 5), Text("b", 2, 2)]
    assert list(cut_at(pieces, 5)) == [Text("a", 5)]


def line(blocks: list[int], length: int) -> str:
    return json.dumps(
        {"timestamp": 0, "input_length": length, "output_length": 3, "hash_ids": blocks}
    )


def test_last_block_of_a_trace_is_part_of_the_one_that_goes_on(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "\n".join(
            [
                line([1, 2], 512 + 100),
                line([1, 3], 512 + 200),
                line([4], 40),
                line([1, 5, 6], 1024 + 9),
            ]
        )
    )
    asks = read_trace(trace, 10)
    assert [ask.prompt_tokens for ask in asks] == [612, 712, 40, 1033]
    assert asks[0].prompt == (Text("block 1", 512), Text("block 5", 100))
    assert asks[1].prompt == (Text("block 1", 512), Text("block 5", 200))
    assert asks[2].prompt == (Text("block 1", 40),)
    assert len(read_trace(trace, 2)) == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no requests"),
        ("not JSON", "line 1: not a request"),
        ('{"input_length": 5}', "line 1: not a request"),
        (line([1], 5) + "\n" + line([1], 513), "line 2: 1 hash_ids for 513"),
    ],
)
def test_what_is_not_a_trace_is_refused(tmp_path, text, reason):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    with pytest.raises(TraceError, match=reason):
        read_trace(trace, 10)


def test_sweep_finds_explicit_intervals_equal_and_the_default_above(workers):
    asks = WORKLOADS["branches"]
    where = {"workload": asks.name, "groups": DEEPSEEK_V4_FLASH.name, "blocks": 6_000}
    jobs = [
        (variant, {**where, "interval": interval})
        for variant in (STOCK, CHANGED)
        for interval in (0, 4096, None)
    ]
    rates = {
        (variant, keywords["interval"]): rate
        for (variant, keywords), rate in workers.run_all("hits", jobs)
    }
    assert rates[CHANGED, 0] == rates[STOCK, 0]
    assert rates[CHANGED, 4096] == rates[STOCK, 4096]
    assert rates[CHANGED, None] > max(rates[STOCK, i] for i in (0, 4096, None))
    bound = sweep.upper_bound(asks.asks(), DEEPSEEK_V4_FLASH)
    assert rates[CHANGED, None] <= bound


def point(variant: str, interval: int | None, rate: float) -> Point:
    return Point("w", "g", 10, variant, interval, rate, 1.0)


def test_points_below_the_aims_are_listed():
    stock = [point(STOCK, 0, 0.5), point(STOCK, None, 0.4)]
    assert sweep.below_aims([*stock, point(CHANGED, None, 0.5)]) == []
    assert "ratio 0.980" in sweep.below_aims([*stock, point(CHANGED, None, 0.49)])[0]
    (unequal,) = sweep.below_aims([*stock, point(CHANGED, 0, 0.51)])
    assert "must be equal" in unequal


def test_summary_counts_pools_above_and_below():
    points = [
        Point("w", "g", blocks, variant, interval, rate, 1.0)
        for blocks, best, changed in ((1, 0.5, 0.6), (2, 0.5, 0.5), (3, 0.5, 0.4))
        for variant, interval, rate in (
            *((STOCK, interval, 0.1) for interval in sweep.INTERVALS[1:]),
            (STOCK, 0, best),
            (CHANGED, None, changed),
            (CHANGED, 0, changed),
        )
    ]
    default, explicit = sweep.summed_up(points)
    assert "of 3 pools: above in 1, equal in 1, below in 1" in default
    assert "ratio 0.800 to 1.200" in default
    assert "in 1 of 3 points" in explicit
    (table,) = hit_tables(points)
    assert len(table.columns) == 8 and table.row_count == 3


def test_queue_benchmark_measures_both_queues(workers):
    rows = workers.run(CHANGED, "queue", blocks=1_000, batch=32, rounds=2, sample=64)
    assert [row["operation"] for row in rows] == [
        "popleft_n",
        "prepend_n",
        "append_n",
        "remove",
        "append_n, probationary",
    ]
    names = ("plain_ns", "segmented_ns", "ratio")
    assert all(row[name] > 0 for row in rows for name in names)


def test_memory_of_a_pool_is_measured_where_nothing_was_freed(workers):
    memory = measure_memory(workers, blocks=200_000)
    assert all(100 < size < 1_000 for size in memory.values())


def test_operations_above_the_aim_are_listed():
    row = {"operation": "prepend_n", "blocks": 10, "batch": 1, "ratio": 1.06}
    assert len(queues_above_aims([row])) == 1
    assert queues_above_aims([{**row, "ratio": 1.05}]) == []
    assert queues_above_aims([{**row, "operation": "remove"}]) == []


def test_settings_take_turns_on_the_same_work(workers):
    plan = next(plan for plan in plans(full=False) if plan.job == "workload")
    short = replace(plan, groups=GEMMA.name, blocks=9_000, aims={}, steps=2, passes=2)
    cost = measure_cost(workers, replace(short, keywords={"workload": "short_chats"}))
    assert set(cost.us) == {"stock 0", "stock None", "changed"}
    assert set(cost.ratio) == {"stock 0", "stock None"}
    assert all(0 < low <= cost.us[side] for side, (low, _) in cost.spread.items())


def test_a_failed_measurement_says_where_its_log_is(workers):
    with pytest.raises(BenchError, match=r"KeyError: 'nothing'.*log: "):
        workers.run(STOCK, "hits", workload="nothing", groups="", blocks=1, interval=0)
    assert workers.run(STOCK, "memory", blocks=10_000)["bytes_per_block"] > 0


def test_plots_are_the_same_bytes_each_time(tmp_path):
    points = [point(STOCK, 0, 0.5), point(CHANGED, None, 0.6), point(CHANGED, 0, 0.5)]
    (first,) = write_plots(points, tmp_path / "one")
    (second,) = write_plots(points, tmp_path / "two")
    assert first.read_bytes() == second.read_bytes()
    assert "changed None" in first.read_text()


def test_load_switches_sessions_and_repeats_their_start():
    load = Load(sessions=3, visits=2, opening=64, turn=32, blocks=10)
    rows = [json.loads(one) for one in trace_lines(load)]
    assert len(rows) == 6
    assert all(len(row["hash_ids"]) * CHUNK == row["input_length"] for row in rows)
    starts = [row["hash_ids"][0] for row in rows]
    assert len(set(starts[:3])) == 3
    assert starts[:3] == starts[3:]
    assert rows[3]["hash_ids"][:4] == rows[0]["hash_ids"]
    assert len(rows[3]["hash_ids"]) == 6


def test_pool_of_contexts_holds_them():
    replay = Replay(DEEPSEEK_V4_FLASH, blocks_to_hold(3, 100_000), 0)
    asks = [Ask(k, (Text(k, 99_000),), Text(f"{k} out", 9)) for k in "abc"]
    for ask in asks:
        assert replay.serve(ask).cached_tokens == 0
    for ask in asks:
        assert replay.serve(ask).cached_tokens == 99_000 // 256 * 256


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--workload", "x"], "no workload 'x'"),
        (["--json", "no/such/folder/f.json"], "no folder"),
        (["--only", "hits", "--trace", "no-such-file"], "cannot read the trace"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments, reason):
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert reason in result.output
    assert "Traceback" not in result.output
