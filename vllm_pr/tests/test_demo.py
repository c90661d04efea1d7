# SPDX-License-Identifier: Apache-2.0
"""``vllm-pr demo``: its figures on the real engine, its words, its exit status."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from vllm_pr import demo
from vllm_pr.demo import CHANGED, SIZES, STOCK, VARIANTS, Row
from vllm_pr.engine.models import model_folder, tiny_model

COMMAND = [sys.executable, "-c", "from vllm_pr.cli import main; main()", "demo"]
KEY_REQUESTS = {
    ("session_switch", "A returns"),
    ("branch", "first branch"),
    ("second_session", "second session"),
}


def run(*words: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=900, **options
    )


def rows(**cached: list[int]) -> list[Row]:
    """Rows of the three key requests; cached tokens by variant, of 100 each."""
    keys = sorted(KEY_REQUESTS, reverse=True)
    return [
        Row(scenario, variant.replace("_", "-"), request, 100, tokens, 0.5)
        for variant, column in cached.items()
        for (scenario, request), tokens in zip(keys, column, strict=True)
    ]


# On the real engine.


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("demo") / "rows.json"
    done = run("--model", "gemma3-tiny", "--json", str(file))
    return done, file


def test_figures(ran):
    """Exact hits: aligned down, and nothing that a setting is known to lose."""
    done, file = ran
    assert done.returncode == 0, done.stderr
    got = {
        (row["scenario"], row["request"], row["variant"]): row["cached_tokens"]
        for row in json.loads(file.read_text())
    }
    size, alignment = SIZES["gemma3-tiny"], tiny_model("gemma3-tiny").alignment
    full = (size.prompt_tokens - 1) // alignment * alignment
    half = size.prompt_tokens // 2 // alignment * alignment
    shared = (size.prompt_tokens - demo.QUESTION - 3) // alignment * alignment
    expected = {
        ("session_switch", "A again"): (full, full, full),
        ("session_switch", "A returns"): (0, full, full),
        ("branch", "first branch"): (half, 0, half),
        ("second_session", "second session"): (shared, 0, shared),
    }
    for key, hits in expected.items():
        assert tuple(got[*key, variant] for variant in VARIANTS) == hits, key
    first = {key: hits for key, hits in got.items() if key[1] in ("A", "first session")}
    assert set(first.values()) == {0}


def test_json_and_table(ran):
    done, file = ran
    found = json.loads(file.read_text())
    assert len(found) == 8 * len(VARIANTS)
    for row in found:
        assert list(row) == [
            "scenario",
            "variant",
            "request",
            "prompt_tokens",
            "cached_tokens",
            "ttft_s",
        ]
        assert row["prompt_tokens"] == SIZES["gemma3-tiny"].prompt_tokens
        assert row["ttft_s"] > 0
    assert all(variant in done.stdout for variant in VARIANTS)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "…" not in done.stdout
    assert "changed: starting the engine" in done.stderr


def test_pool_too_small_for_one_request():
    done = run("--model", "gemma3-tiny", "--blocks", "20")
    assert done.returncode == 2
    assert "a pool of 20 blocks does not hold one request" in done.stderr
    assert len(done.stderr.splitlines()) == 2  # the engine that starts, and the reason


def test_interrupt_leaves_no_engine():
    shell = subprocess.Popen(
        [*COMMAND, "--model", "gemma3-tiny"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    engine = first_child(shell.pid, patience=60)
    os.kill(shell.pid, signal.SIGINT)
    _, said = shell.communicate(timeout=60)
    assert shell.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    assert not psutil.pid_exists(engine)


def first_child(process: int, patience: float) -> int:
    """The first engine that a process starts."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        for child in psutil.Process(process).children():
            if "vllm_pr.engine.worker" in child.cmdline():
                return child.pid
        time.sleep(0.1)
    raise TimeoutError(f"no engine after {patience} s")


# Without an engine.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "llama-huge"], "unknown model 'llama-huge'"),
        (["--json", "/nowhere/rows.json"], "there is no folder /nowhere"),
        (["--json", "/"], "it is a folder"),
        (["--release", "9.9.9"], "no such release here: 9.9.9"),
        (["--release", "0.33.0"], "no CPU engine of vLLM 0.33.0"),
        (["--release", "0.28.0"], "dsv4-tiny needs vLLM 0.30.0 or later"),
        (["--blocks", "0"], "--blocks"),
    ],
)
def test_bad_input_is_said_before_an_engine_starts(words, said):
    done = run(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "starting the engine" not in done.stderr
    assert "Traceback" not in done.stderr


def test_help_needs_no_vllm():
    script = (
        "import sys; from vllm_pr import demo; "
        "sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
    assert "--release" in run("--help").stdout


@pytest.mark.parametrize("model", SIZES)
def test_chats_have_the_stated_lengths(model):
    """Through the real template: all of one length, sharing what they should."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(model))
    length = SIZES[model].prompt_tokens

    def shared(scenario: str, one: str, other: str) -> int:
        chats = dict(demo.scenarios(length)[scenario])
        a, b = (
            tokenizer.apply_chat_template(
                chats[name], add_generation_prompt=True, return_dict=False
            )
            for name in (one, other)
        )
        assert len(a) == len(b) == length
        return len(os.path.commonprefix([a, b]))

    assert shared("session_switch", "A", "A returns") == length
    assert shared("session_switch", "A", "B") < tiny_model(model).alignment + 256
    assert shared("branch", "A", "first branch") == length // 2 + 1
    assert shared("second_session", "first session", "second session") == (
        length - demo.QUESTION - 2
    )


def test_verdict_follows_the_figures():
    figures = rows(
        stock_none=[0, 87, 49], stock_default=[99, 0, 0], changed=[99, 87, 49]
    )
    said = demo.verdict(figures)
    assert demo.below_stock(figures) == []
    assert said.startswith("Changed is at least as good")
    assert "A returns 99 % (stock: 0 % and 99 %)" in said
    assert "first branch 49 % (stock: 49 % and 0 %)" in said
    assert "Neither stock setting has all three" in said


def test_verdict_when_a_stock_setting_has_all():
    figures = rows(
        stock_none=[99, 87, 49], stock_default=[99, 0, 0], changed=[99, 87, 49]
    )
    assert "Neither" not in demo.verdict(figures)


@pytest.mark.parametrize("best", STOCK)
def test_changed_below_either_stock_setting_fails(best, monkeypatch, capsys):
    columns = {"stock_none": [0, 0, 0], "stock_default": [0, 0, 0]}
    columns[best.replace("-", "_")] = [99, 87, 49]
    figures = rows(**columns, changed=[99, 86, 49])
    (worse,) = demo.below_stock(figures)
    assert (worse.variant, worse.scenario) == (CHANGED, "second_session")
    assert demo.verdict(figures).startswith("Changed is below a stock setting in:")
    monkeypatch.setattr(demo, "run", lambda *arguments: (figures, "0.32.0"))
    monkeypatch.setattr(demo, "_trees", lambda *arguments: {})
    with pytest.raises(demo.typer.Exit) as ended:
        demo.demo()
    assert ended.value.exit_code == 1
    assert "below a stock setting" in capsys.readouterr().out


def test_progress_names_the_request_once(monkeypatch):
    """Also between two requests, when the engine says only what it does."""
    shown = []

    class Stub:
        info = SimpleNamespace(release="0.32.0")
        reset_prefix_cache = render = lambda *arguments: None

        def __init__(self, on_progress):
            self.on_progress = on_progress

        def ask(self, prompt):
            self.on_progress("prefilling", 0, 0)
            return SimpleNamespace(prompt_tokens=100, cached_tokens=0, ttft_s=0.5)

    @contextmanager
    def start(*arguments, on_progress, **options):
        yield Stub(on_progress)

    def update(bar, task, description="", **more):
        shown.append(description)

    monkeypatch.setattr(demo, "start_engine", start)
    monkeypatch.setattr(demo.Progress, "update", update)
    trees = dict.fromkeys(VARIANTS)
    quiet = demo.Console(quiet=True)
    demo.run("dsv4-tiny", trees, SIZES["dsv4-tiny"], quiet)
    assert "stock-none: session switch, A returns: prefilling" in shown
    assert "changed: branch, first branch: prefilling" in shown
    assert max(text.count("prefilling") for text in shown) == 1


def test_json_is_written_when_changed_fails(monkeypatch, tmp_path):
    figures = rows(stock_none=[9, 9, 9], stock_default=[9, 9, 9], changed=[8, 9, 9])
    monkeypatch.setattr(demo, "run", lambda *arguments: (figures, "0.32.0"))
    monkeypatch.setattr(demo, "_trees", lambda *arguments: {})
    file: Path = tmp_path / "rows.json"
    with pytest.raises(demo.typer.Exit):
        demo.demo(json_file=file)
    assert len(json.loads(file.read_text())) == 9
