# SPDX-License-Identifier: Apache-2.0
"""The scenarios: exact hit lengths, and a driver that does what the scheduler does."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm_pr.driver import Driver, OutOfBlocks, block_sizes
from vllm_pr.engine.models import model_folder
from vllm_pr.releases import stock_tree
from vllm_pr.scenarios import (
    DEEPSEEK_V4_FLASH,
    GEMMA,
    SCENARIOS,
    Scenario,
    Text,
    run,
    session_switch,
    token_ids,
)

DENSE, ENDS_ONLY = None, "default"  # of stock 0.32.0

# Cached tokens by scenario and request: stock None, stock default, changed default.
# Design, section 1: 99 %, 0 % and 49 %, 86 %, 99 %.
HITS = {
    ("session_switch_50k", "A resend"): (49_920, 49_920, 49_920),
    ("session_switch_50k", "A return"): (49_920, 49_920, 49_920),
    ("session_switch_250k", "A resend"): (249_856, 249_856, 249_856),
    ("session_switch_250k", "A return"): (0, 249_856, 249_856),
    ("branch", "first branch"): (24_832, 0, 24_832),
    ("branch", "second branch"): (24_832, 24_832, 24_832),
    ("system_prompt", "second session"): (19_968, 0, 19_968),
    ("system_prompt", "third session"): (19_968, 19_968, 19_968),
    ("multi_turn", "chat turn 5"): (37_888, 37_376, 37_888),
    ("round_robin", "A turn 2"): (0, 49_920, 49_920),
    ("round_robin", "B turn 3"): (0, 50_432, 50_688),
    ("edit_end", "edited"): (4_960, 0, 4_960),
}


def worker(tree: object, *arguments: str) -> list[dict]:
    """Rows of the worker on the vLLM in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_pr.scenarios", "--json", *arguments],
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def hits(rows: Iterator[dict]) -> dict[tuple[str, str], int]:
    return {(row["scenario"], row["request"]): row["cached_tokens"] for row in rows}


@pytest.fixture(scope="module")
def stock() -> dict[object, dict[tuple[str, str], int]]:
    """What stock serves, by interval."""
    intervals = ("--interval", "none", "--interval", "default")
    rows = worker(stock_tree(), *intervals, "--eagle", "off")
    return {
        interval: hits(row for row in rows if row["interval"] == interval)
        for interval in (DENSE, ENDS_ONLY)
    }


def test_hit_lengths_of_stock_are_those_of_the_design(stock):
    for key, (dense, ends_only, _) in HITS.items():
        assert (stock[DENSE][key], stock[ENDS_ONLY][key]) == (dense, ends_only), key


@pytest.mark.parametrize("name", SCENARIOS)
def test_hit_lengths_of_changed_are_at_least_both_of_stock(name, stock):
    for row in run(SCENARIOS[name]):
        key = (row.scenario, row.request)
        assert row.cached_tokens >= max(stock[DENSE][key], stock[ENDS_ONLY][key]), key
        if key in HITS:
            assert row.cached_tokens == HITS[key][2], key


@pytest.mark.parametrize("interval", [0, 4096])
def test_an_explicit_interval_is_as_in_stock(interval):
    names = ("branch", "system_prompt", "round_robin")
    chosen = [word for name in names for word in ("--scenario", name)]
    rows = worker(stock_tree(), "--interval", str(interval), *chosen)
    expected = {(r["scenario"], r["eagle"], r["request"]): r for r in rows}
    for name in names:
        for eagle in (False, True):
            for row in run(SCENARIOS[name], eagle, interval):
                same = expected[row.scenario, row.eagle, row.request]
                assert row.cached_tokens == same["cached_tokens"]


def test_a_finished_250k_request_holds_little_and_its_prefill_no_more_than_a_quarter():
    driver = Driver(DEEPSEEK_V4_FLASH, 20_000)
    served = driver.run(token_ids(Text("A", 250_000)))
    assert served.cached_tokens == 0 and served.peak_blocks < 0.25 * 20_000
    assert served.steps == 31  # chunks of 8,192 tokens
    assert driver.used_blocks == 0


def test_with_lookahead_hashes_a_resend_loses_nothing_and_beside_a_connector_a_block():
    """0.33.0 serves EAGLE by hashes that cover the next token, or drops a block."""
    program = """
import json, sys
from vllm_pr.driver import Driver, has_lookahead_hashes
from vllm_pr.scenarios import DEEPSEEK_V4_FLASH, Text, token_ids
prompt = token_ids(Text("A", 50_000))
found = [has_lookahead_hashes()]
for block_drop in (False, True):
    driver = Driver(DEEPSEEK_V4_FLASH, 20_000, eagle=True, block_drop=block_drop)
    found.append([driver.run(prompt).cached_tokens for _ in range(2)])
print(json.dumps(found))
"""
    for tree in (stock_tree("0.33.0"), changed("0.33.0")):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        assert found == [True, [0, 49_920], [0, 49_664]], done.stderr


def changed(release: str) -> object:
    from vllm_pr.patching.trees import changed_tree

    return changed_tree(release)


# --- the driver


def test_block_sizes_are_least_multiple_and_greatest_divisor():
    assert block_sizes(DEEPSEEK_V4_FLASH) == (256, 4)
    assert block_sizes(GEMMA) == (32, 16)
    sizes = [group.block_size for group in DEEPSEEK_V4_FLASH.groups]
    assert sizes == [64, 64, 256, 8, 4]


def test_token_ids_are_the_same_everywhere_and_a_text_can_start_in_the_middle():
    assert token_ids(Text("A", 3)) == [23263, 41636, 46280]
    assert token_ids(Text("A", 5))[2:] == token_ids(Text("A", 3, start=2))
    assert token_ids(Text("A", 2), Text("B", 2)) == [
        *token_ids(Text("A", 2)),
        *token_ids(Text("B", 2)),
    ]


def test_the_cheap_hash_finds_what_sha256_finds():
    scenario = session_switch("small", DEEPSEEK_V4_FLASH, 3_000, 400, 512)
    rows = [[row for row in run(scenario)], [*run(scenario, hash_function=sha256)]]
    assert rows[0] == rows[1]
    assert rows[0][1].cached_tokens == 2_816


def test_a_prompt_that_does_not_fit_is_an_error_and_leaves_the_pool_free():
    driver = Driver(DEEPSEEK_V4_FLASH, 300, chunk_tokens=512)
    with pytest.raises(OutOfBlocks, match="no room for 512 more tokens after 0"):
        driver.run(token_ids(Text("A", 40_000)))
    assert driver.used_blocks == 0
    assert driver.run(token_ids(Text("B", 1_000))).cached_tokens == 0


def test_two_requests_at_once_and_one_that_is_given_up():
    driver = Driver(DEEPSEEK_V4_FLASH, 2_000, chunk_tokens=512)
    requests = [driver.request(token_ids(Text(key, 3_000))) for key in "AB"]
    first, second = (driver.steps(request, [1, 2, 3]) for request in requests)
    turns = [(next(first), next(second)) for _ in range(3)]
    assert turns == [(512, 512)] * 3
    used = driver.used_blocks
    second.close()
    assert 0 < driver.used_blocks < used
    assert sum(first) == 3_000 - 3 * 512 + 2
    assert driver.used_blocks == 0


@pytest.mark.parametrize("interval", [-256, 100])
def test_an_interval_that_the_release_refuses(interval):
    with pytest.raises(ValueError, match="prefix_cache_retention_interval"):
        Driver(DEEPSEEK_V4_FLASH, 200, interval=interval)


# --- the driver and the real scheduler


def scheduler(driver: Driver, chunk_tokens: int) -> Scheduler:
    """The real scheduler with the groups of a driver."""
    groups = driver.manager.kv_cache_config
    config = EngineArgs(
        model=str(model_folder("gemma3-tiny")),
        max_model_len=32_768,
        max_num_batched_tokens=chunk_tokens,
        max_num_seqs=4,
        enable_prefix_caching=True,
        async_scheduling=False,
        prefix_cache_retention_interval=groups.prefix_cache_retention_interval,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = groups.num_blocks
    scheduler_block, hash_block = block_sizes(driver.geometry)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=groups,
        structured_output_manager=StructuredOutputManager(config),
        block_size=scheduler_block,
        hash_block_size=hash_block,
    )


def serve(server: Scheduler, request: Request, output: list[int]) -> int:
    """Run a request to its end; the tokens that the cache served."""
    server.add_request(request)
    left, scheduled = iter(output), 0
    while not request.is_finished():
        step = server.schedule()
        if request.num_output_tokens == 0:
            scheduled += step.num_scheduled_tokens[request.request_id]
        is_sampled = request.num_computed_tokens >= request.num_tokens
        server.update_from_output(
            step,
            ModelRunnerOutput(
                req_ids=[request.request_id],
                req_id_to_index={request.request_id: 0},
                sampled_token_ids=[[next(left)] if is_sampled else []],
            ),
        )
    return request.num_prompt_tokens - scheduled


def free_list(pool: object) -> list[int]:
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


@pytest.mark.parametrize("interval", [None, 0])
@pytest.mark.parametrize(
    ("name", "blocks"), [("switch", 420), ("branch", 900), ("multi_turn", 500)]
)
def test_the_scheduler_hits_the_same_and_leaves_the_same_free_list(
    name, blocks, interval
):
    scenario = small_scenario(name)
    mine = Driver(scenario.geometry, blocks, interval, chunk_tokens=512)
    other = Driver(scenario.geometry, blocks, interval, chunk_tokens=512)
    server = scheduler(other, 512)
    hit = []
    for ask in scenario.asks:
        prompt, output = token_ids(*ask.prompt), token_ids(ask.output)
        request = Request(
            request_id=ask.name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=len(output)),
            pooling_params=None,
            block_hasher=other.block_hasher,
        )
        hit.append(mine.run(prompt, output).cached_tokens)
        assert serve(server, request, output) == hit[-1]
        served = server.kv_cache_manager.block_pool
        assert free_list(served) == free_list(mine.pool)
    assert any(hit)


def small_scenario(name: str) -> Scenario:
    """A scenario with a tenth of the tokens: the scheduler is slow."""
    if name == "switch":
        return session_switch(name, DEEPSEEK_V4_FLASH, 3_000, 420, 512)
    scenario = SCENARIOS[name]

    def tenth(text: Text) -> Text:
        return replace(text, tokens=max(2, text.tokens // 10))

    asks = [
        replace(ask, prompt=tuple(map(tenth, ask.prompt)), output=tenth(ask.output))
        for ask in scenario.asks
    ]
    return replace(scenario, asks=tuple(asks))
