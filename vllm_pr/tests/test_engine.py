# SPDX-License-Identifier: Apache-2.0
"""The tiny models, their engine process and their server, on the real vLLM."""

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from vllm_pr.engine.models import MODELS, model_folder, tiny_model
from vllm_pr.engine.processes import EngineError
from vllm_pr.engine.runner import Engine, start_engine
from vllm_pr.engine.server import serve
from vllm_pr.engine.tokenizer import PRELUDE_TOKENS, SPECIAL, VOCAB_SIZE, alphabet
from vllm_pr.engine.variants import (
    command_line,
    plan_launch,
    tree_release,
    variant_named,
)

LENGTH = 1_100
# Total variation, of at most 1: what one token of 1,100 moves at least, and what
# another batch may at most; two prompts are nearly 1 apart.
MOVED, ROUNDED = 0.02, 0.25


@pytest.fixture(scope="module", params=list(MODELS))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with start_engine(request.param, "stock-none", blocks=900) as running:
        running.reset_prefix_cache()
        yield running


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(len(SPECIAL), VOCAB_SIZE), k=length)


def distance(one: dict[int, float], other: dict[int, float]) -> float:
    """Total variation of two distributions, of which the likeliest tokens are known."""
    return 0.5 * sum(
        abs(math.exp(one.get(token, -math.inf)) - math.exp(other.get(token, -math.inf)))
        for token in one.keys() | other.keys()
    )


def members(group: int) -> list[int]:
    """Processes of a process group; one that only waits to be reaped does not count."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            waits = process.status() == psutil.STATUS_ZOMBIE
            if os.getpgid(process.pid) == group and not waits:
                found.append(process.pid)
    return found


def comes_true(question: Callable[[], bool], patience: float) -> bool:
    """Whether it becomes true within ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while not question():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


# The engine.


def test_engine_runs_what_was_asked_for(engine):
    assert engine.info.release == tree_release(None)
    assert engine.info.blocks == 900
    assert engine.info.caching
    assert engine.info.interval is None
    expected = {
        "dsv4-tiny": [4, 8, 64, 64, 256],
        "gemma3-tiny": [32, 32, 32],
    }
    assert sorted(engine.info.group_block_sizes) == expected[engine.model.name]


def test_output_depends_on_every_part_of_the_prompt_not_on_the_cache(engine):
    """One changed early token moves it far more than a cache hit does."""
    base = prompt(1)
    cold = engine.ask(base, logprobs=20)
    warm = engine.ask(base, logprobs=20)
    aligned = LENGTH // engine.model.alignment * engine.model.alignment
    assert (cold.cached_tokens, warm.cached_tokens) == (0, aligned)
    assert warm.tokens == cold.tokens
    noise = distance(cold.logprobs[0], warm.logprobs[0])
    moved = {}
    for place in (2, 60, 300, 700):
        other = list(base)
        other[place] = len(SPECIAL) + (other[place] + 100) % len(alphabet())
        got = engine.ask(other, logprobs=20)
        moved[place] = distance(cold.logprobs[0], got.logprobs[0])
    assert min(moved.values()) > max(4 * noise, MOVED), (moved, noise)


def test_same_seed_same_output_in_one_batch(engine):
    """Requests sent together get what each gets alone, within rounding."""
    prompts = [prompt(seed, 300) for seed in (3, 4, 5)]
    alone = [engine.ask(each, max_tokens=2, logprobs=5) for each in prompts]
    engine.reset_prefix_cache()
    together = engine.ask_all(prompts, max_tokens=[2, 2, 2], logprobs=5)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens[0] in other.logprobs[0]
        assert distance(one.logprobs[0], other.logprobs[0]) < ROUNDED


def test_reset_forgets(engine):
    again = prompt(6, 600)
    engine.ask(again)
    assert engine.ask(again).cached_tokens > 0
    engine.reset_prefix_cache()
    assert engine.ask(again).cached_tokens == 0


def test_chats_share_a_prelude_of_known_length(engine):
    one = engine.render([{"role": "user", "content": "Hello"}])
    other = engine.render(
        [{"role": "system", "content": "Bye"}, {"role": "user", "content": "Hello"}]
    )
    assert one[:PRELUDE_TOKENS] == other[:PRELUDE_TOKENS]
    assert one[PRELUDE_TOKENS] != other[PRELUDE_TOKENS]
    assert len(one) == PRELUDE_TOKENS + len("uHello.a")


def test_request_that_does_not_fit_is_one_line_and_the_engine_goes_on(engine):
    with pytest.raises(EngineError) as failed:
        engine.ask(prompt(7, engine.model.max_model_len + 1))
    assert "maximum context length is 4096" in str(failed.value)
    assert "\n" not in str(failed.value)
    assert engine.ask(prompt(7, 40)).prompt_tokens == 40


def describe(worker, key: str) -> dict:
    """For the test below: runs in the engine's process."""
    blocks = worker.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    return {key: blocks, "process": os.getpid()}


def test_call_reaches_the_scheduler(engine):
    got = engine.call("vllm_pr.tests.test_engine:describe", key="blocks")
    assert got == {"blocks": 900, "process": engine.process.pid}


def test_pool_too_small_is_one_line_and_leaves_no_process():
    with (
        pytest.raises(EngineError, match="To serve at least one request") as failed,
        start_engine("gemma3-tiny", blocks=40),
    ):
        pytest.fail("the engine started")
    assert "\n" not in str(failed.value)


def test_engine_that_dies_is_one_line():
    def kill(*progress: object) -> None:
        children = psutil.Process().children()
        max(children, key=psutil.Process.create_time).kill()

    with (
        pytest.raises(EngineError, match="the engine's process ended") as failed,
        start_engine("gemma3-tiny", on_progress=kill),
    ):
        pytest.fail("the engine started")
    assert "\n" not in str(failed.value)


# The server.


def test_server_counts_cached_tokens_and_stops():
    lines = []
    with serve(
        "gemma3-tiny", "stock-none", on_wait=lambda waited, line: lines.append(line)
    ) as server:
        assert lines
        with httpx.Client(base_url=server.url, trust_env=False, timeout=120) as client:
            chat = {
                "model": server.model,
                "messages": [{"role": "user", "content": "a" * 500}],
                "max_tokens": 1,
            }
            usages = [
                client.post("/v1/chat/completions", json=chat).json()["usage"]
                for _ in range(2)
            ]
            info = client.get("/metrics").text
        group = server.process.pid
        assert len(members(group)) >= 3  # the API server, the engine core, its worker
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    length = PRELUDE_TOKENS + 500 + len("u.a")
    assert [usage["prompt_tokens"] for usage in usages] == [length, length]
    assert cached == [0, length // 32 * 32]
    assert 'prefix_cache_retention_interval="None"' in info
    assert comes_true(lambda: not members(group), patience=20)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", trust_env=False)


def test_server_that_cannot_start_says_why():
    with (
        pytest.raises(EngineError, match="max-model-len") as failed,
        serve("gemma3-tiny", extra_args=["--max-model-len", "many"]),
    ):
        pytest.fail("the server started")
    assert "\n" not in str(failed.value)


# What they are started with.


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("stock-none", ["--prefix-cache-retention-interval", "None"]),
        ("caching-off", ["--no-enable-prefix-caching"]),
        ("tiny-pool", ["--num-gpu-blocks-override", "172"]),
    ],
)
def test_variant_on_the_command_line(variant, expected):
    launch = plan_launch(tiny_model("gemma3-tiny"), variant_named(variant))
    words = command_line(launch.engine_args)
    at = words.index(expected[0])
    assert words[at : at + len(expected)] == expected


def test_default_variant_sets_no_interval():
    launch = plan_launch(tiny_model("gemma3-tiny"), variant_named("stock-default"))
    assert "--prefix-cache-retention-interval" not in command_line(launch.engine_args)


def test_release_before_the_option_is_not_given_it(tmp_path):
    version = tmp_path / "vllm" / "_version.py"
    version.parent.mkdir()
    version.write_text("__version__ = version = '0.28.0'\n")
    launch = plan_launch(
        tiny_model("gemma3-tiny"), variant_named("stock-none"), tmp_path
    )
    assert launch.release == "0.28.0"
    assert "prefix_cache_retention_interval" not in launch.engine_args
    assert launch.env["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)


def test_changed_goes_first_on_the_path():
    launch = plan_launch(tiny_model("gemma3-tiny"), variant_named("changed"))
    first = Path(launch.env["PYTHONPATH"].split(os.pathsep)[0])
    assert (first / "vllm" / "v1" / "core" / "free_block_queue.py").is_file()


def test_settings_of_this_shell_do_not_reach_the_engine(monkeypatch):
    monkeypatch.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", "64")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    launch = plan_launch(tiny_model("gemma3-tiny"), variant_named("stock-default"))
    assert "VLLM_PREFIX_CACHE_RETENTION_INTERVAL" not in launch.env
    assert "/elsewhere" not in launch.env["PYTHONPATH"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda: tiny_model("llama-huge"),
        lambda: variant_named("stock-fast"),
        lambda: tree_release(Path("/nowhere")),
    ],
)
def test_what_there_is_not_is_one_line(ask):
    with pytest.raises(ValueError) as failed:
        ask()
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize("name", MODELS)
def test_model_folder(name):
    folder = model_folder(name)
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == VOCAB_SIZE
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert model_folder(name) == folder
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_one_character_is_one_token():
    from tokenizers import Tokenizer

    folder = model_folder("gemma3-tiny")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "Hello,\nwörld!\t" + "".join(alphabet())
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.encode("<|user|>x").ids[0] == SPECIAL.index("<|user|>")


def test_engine_does_not_outlive_a_killed_parent(tmp_path):
    """Not even where the parent had no time to stop it."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, psutil, signal\n"
        "from vllm_pr.engine.runner import start_engine\n"
        "def report(*progress):\n"
        "    print(*[each.pid for each in psutil.Process().children()], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "with start_engine('gemma3-tiny', on_progress=report):\n"
        "    pass\n"
    )
    parent = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, timeout=60
    )
    assert parent.returncode == -signal.SIGKILL
    (child,) = map(int, parent.stdout.split())
    assert comes_true(lambda: not members(child), patience=30)
