# SPDX-License-Identifier: Apache-2.0
"""``vllm-pr doctor`` against real servers: each has its own verdict.

One server runs at a time; tests of the same server stand together, and the one that
judges it comes first, while its cache is new. Each run's JSON is kept under
``build/doctor``; the evidence in ``doctor_evidence`` was recorded that way.
"""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest
from doctor_kit import (
    Proxy,
    Run,
    doctor,
    doctor_on_terminal,
    flood,
    one_line,
    served,
    started,
    wait_for,
)

from vllm_pr.doctor.evidence import EDITED
from vllm_pr.doctor.metrics import Snapshot, parse_wanted
from vllm_pr.doctor.verdicts import PARTIAL
from vllm_pr.engine.models import BUILD
from vllm_pr.engine.server import Server, serve
from vllm_pr.releases import stock_tree

RESULTS = BUILD / "doctor"
KEY = "not-to-be-printed"
APPLY = "vllm-pr apply --python /path/to/python"


def _options(name: str) -> dict:
    """Keyword arguments of ``serve`` for the server called ``name``."""
    if name == "stock-none":  # without details in usage: counters have to do
        words = ["--no-enable-prompt-tokens-details"]
        return {"variant": "stock-none", "extra_args": words}
    if name == "changed":
        return {"variant": "changed", "extra_args": ["--api-key", KEY]}
    if name == "0.28.0":
        return {"variant": "stock-default", "tree": stock_tree("0.28.0")}
    return {"variant": name}


@pytest.fixture(scope="module")
def running() -> Iterator[Callable[[str], Server]]:
    """``running(name)``: that server; it replaces the one before."""
    current: dict[str, Server] = {}
    with ExitStack() as stack:

        def get(name: str) -> Server:
            if name not in current:
                stack.close()
                current.clear()
                server = serve("gemma3-tiny", **_options(name), timeout=900)
                current[name] = stack.enter_context(server)
            return current[name]

        yield get


def judge(server: Server, name: str, *words: object, **kwargs) -> Run:
    """Run the doctor with time to spare: a busy machine must not change a verdict."""
    return doctor(
        *("--url", server.url, "--yes", "--time-limit", 3000, *words),
        json_file=RESULTS / f"{name}.json",
        **kwargs,
    )


def metrics(server: Server) -> Snapshot:
    return parse_wanted(httpx.get(f"{server.url}/metrics", trust_env=False).text)


def check_bounds(run: Run) -> None:
    """What it sent is within what it had said, and so is what it printed."""
    evidence = run.evidence
    plan = evidence.plan
    sent = sum(reply.prompt_tokens for reply in evidence.replies)
    assert f"at most {plan.bound_tokens:,} prompt tokens" in run.out
    assert 0.2 * plan.bound_tokens < sent <= plan.bound_tokens
    assert len(evidence.replies) <= plan.bound_requests
    assert "\x1b" not in run.out + run.err
    assert run.err == ""


# -- stock 0.32.0, as it ships -----------------------------------------------------


def test_stock_default_keeps_too_little(running):
    run = judge(running("stock-default"), "stock-default")
    assert run.names() == {"sparse-retention"}
    assert run.status == 1
    assert run.commands("sparse-retention")[0] == APPLY
    assert "fault found: sparse-retention" in run.out
    check_bounds(run)
    hits = {reply.name: reply.cached_tokens for reply in run.evidence.replies}
    assert hits["A after B"] == hits["A again"] > hits["branch off A again"]
    assert {hits[name] for name in PARTIAL} == {256}
    assert not run.evidence.traffic.seen


def test_asks_first_and_takes_no_for_an_answer(running):
    server = running("stock-default")
    before = metrics(server)
    status, written = doctor_on_terminal("--url", server.url, answer="n\n")
    assert status == 2
    assert "at most" in written and "nothing was sent" in written
    assert metrics(server).since(before, "queries") == 0


def test_colour_and_progress_on_a_terminal(running):
    """Each request takes half a second at least; an edited end shows the fault."""
    with served(Proxy(running("stock-default").url, delay=0.5)) as place:
        words = ("--url", f"http://{place}", "--time-limit", 1)
        status, written = doctor_on_terminal(*words, answer="y\n")
    assert status == 1
    assert "\x1b[1;31mFAULT" in written
    assert re.search(r"A: \d+\.\d s, pool \d+% in use", written)


def test_unknown_model_and_too_long_a_prompt(running):
    url = running("stock-default").url
    wrong = doctor("--url", url, "--yes", "--model", "nobody")
    assert wrong.status == 2
    assert "'nobody'" in one_line(wrong.err) and "gemma3-tiny" in wrong.err
    long = doctor("--url", url, "--yes", "--prompt-tokens", 5000)
    assert long.status == 2
    assert "4087" in one_line(long.err)
    silent = doctor("--url", url)
    assert silent.status == 2
    assert "--yes" in one_line(silent.err)


def test_short_sessions_are_below_the_alignment(running):
    server = running("stock-default")
    run = judge(server, "short-sessions", "--prompt-tokens", 270)
    again = run.evidence.reply("short prompt again")
    assert again.prompt_tokens in range(260, 271)
    assert again.cached_tokens == 256  # above it, as the prelude alone is: no finding
    assert "short-prompts" not in run.names() | run.names("note")


def test_behind_a_proxy_that_hides_metrics(running):
    """Usage tells cached tokens: a lost branch shows, a good switch is no proof."""
    url = running("stock-default").url
    with served(Proxy(url, "/metrics", "/tokenize")) as place:
        run = doctor(
            *("--url", f"http://{place}", "--yes", "--time-limit", 3000),
            json_file=RESULTS / "proxy.json",
        )
    assert run.status == 1
    assert run.names() == {"sparse-retention"}
    assert run.names("unsure") == {"no-metrics", "not-provoked"}
    sent = sum(reply.prompt_tokens for reply in run.evidence.replies)
    assert sent <= run.evidence.plan.bound_tokens


def test_interrupt_leaves_no_request_running(running):
    server = running("stock-default")
    proxy = Proxy(server.url)
    with (
        served(proxy) as place,
        started("--url", f"http://{place}", "--yes") as process,
    ):
        assert proxy.asked.wait(60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2, out + err
    assert "no request left running" in one_line(err)
    assert metrics(server).total["running"] == 0


def test_another_client(running):
    server = running("stock-default")
    with flood(server, users=2, prompt=400, output=16):
        run = judge(server, "other-client")
    assert run.names() == {"sparse-retention"}
    assert "other-traffic" in run.names("note")
    assert run.status == 1
    assert run.evidence.traffic.requests > 0
    assert run.evidence.traffic.running >= 1


def test_server_that_dies(running):
    server = running("stock-default")
    before = metrics(server)
    with started("--url", server.url, "--yes") as process:
        # The first prompt is in, all the others are to come.
        wait_for(lambda: metrics(server).since(before, "prompt_tokens"))
        os.killpg(server.process.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "closed the connection" in one_line(err)
    assert "could not measure: incomplete" in out


# -- stock 0.32.0 with dense checkpoints -------------------------------------------


def test_stock_none_flushes(running):
    run = judge(running("stock-none"), "stock-none")
    assert run.names() == {"session-flush"}
    assert run.status == 1
    commands = run.commands("session-flush")
    assert commands[0] == APPLY
    assert any("--prefix-cache-retention-interval 0" in c for c in commands)
    check_bounds(run)
    hits = {reply.name: reply.cached_tokens for reply in run.evidence.replies}
    assert run.evidence.switches[-1].cached_after == 256 < hits["A again"] / 2
    assert min(hits[name] for name in PARTIAL) > 256
    assert {r.cached_from for r in run.evidence.replies} == {"counters"}


def test_other_client_without_usage_details(running):
    """Counters then say nothing about one request."""
    server = running("stock-none")
    with flood(server, users=2, prompt=400, output=16):
        run = judge(server, "other-client-counters")
    assert run.status == 2
    assert {"cached-unknown", "other-traffic"} <= run.names("unsure")
    commands = run.commands("cached-unknown")
    assert "--enable-prompt-tokens-details" in commands[0]


# -- changed 0.32.0 ------------------------------------------------------------------


def test_changed_is_healthy(running):
    server = running("changed")
    run = judge(
        server, "changed", "--api-key-env", "DOCTOR_KEY", env={"DOCTOR_KEY": KEY}
    )
    assert run.names() == run.names("unsure") == set()
    assert "healthy" in run.names("note")
    assert run.status == 0
    check_bounds(run)
    evidence = run.evidence
    for name in ("A after B", *PARTIAL):
        reply = evidence.reply(name)
        unit = evidence.alignment
        shared = min(reply.shared_tokens, reply.prompt_tokens - 1)
        assert reply.cached_tokens == shared // unit * unit
    assert evidence.template.kept_tokens == evidence.template.previous_tokens
    assert evidence.template.answer_kept is not False
    assert KEY not in run.out + run.err + (RESULTS / "changed.json").read_text("utf-8")


def test_changed_with_a_full_pool_is_healthy(running):
    """Whole sessions fill it; that a first branch then misses is capacity, no fault."""
    run = judge(
        *(running("changed"), "changed-full", "--api-key-env", "DOCTOR_KEY"),
        env={"DOCTOR_KEY": KEY},
    )
    assert run.names() == run.names("unsure") == set()
    assert {"healthy", "full-pool"} <= run.names("note")
    assert run.status == 0
    assert "healthy, notes: full-pool" in run.out
    hits = {reply.name: reply.cached_tokens for reply in run.evidence.replies}
    assert hits["branch off A"] == 256 < hits["branch off A again"]
    assert hits[EDITED] > 256


def test_changed_has_no_fault_while_others_use_it(running):
    """They may take the room of what the doctor sent: no fault of the server's."""
    server = running("changed")
    with flood(server, users=2, prompt=400, output=16, key=KEY):
        run = judge(
            *(server, "changed-busy", "--api-key-env", "DOCTOR_KEY"),
            env={"DOCTOR_KEY": KEY},
        )
    assert run.names() == set()
    assert "other-traffic" in run.names("note")
    assert run.status in (0, 2)


def test_template_that_is_not_prefix_stable(running):
    """Played by a proxy that puts the number of messages before the first."""
    with served(Proxy(running("changed").url, count=True)) as place:
        run = doctor(
            *("--url", f"http://{place}", "--yes", "--time-limit", 3000),
            *("--api-key-env", "DOCTOR_KEY"),
            env={"DOCTOR_KEY": KEY},
            json_file=RESULTS / "template.json",
        )
    assert run.names() == {"template"}
    assert run.status == 1
    assert "--chat-template" in run.commands("template")[0]
    template = run.evidence.template
    assert template.stable_in_time
    assert template.kept_tokens < 270 < template.previous_tokens / 2
    assert run.evidence.reply("conversation, turn 2").cached_tokens == 256


@pytest.mark.parametrize("key", [None, "wrong-key"])
def test_without_the_right_key(running, key):
    words = ["--api-key-env", "DOCTOR_KEY"] if key else []
    run = doctor(
        *("--url", running("changed").url, "--yes", *words),
        env={"DOCTOR_KEY": key or ""},
    )
    assert run.status == 2
    assert "401" in one_line(run.err) and "--api-key-env" in run.err
    assert not key or key not in run.err


# -- the other causes ----------------------------------------------------------------


def test_caching_off(running):
    run = judge(running("caching-off"), "caching-off")
    assert run.names() == {"caching-off"}
    assert run.status == 1
    assert run.commands("caching-off") == ["vllm serve MODEL --enable-prefix-caching"]
    assert [r.cached_tokens for r in run.evidence.replies] == [0, 0, 0, 0]


def test_pool_too_small(running):
    run = judge(running("tiny-pool"), "tiny-pool")
    assert run.names() == {"capacity", "sparse-retention"}
    assert run.status == 1
    finding = next(f for f in run.content["findings"] if f["name"] == "capacity")
    assert any("172 blocks" in line for line in finding["evidence"])
    check_bounds(run)


def test_preemption(running, tmp_path):
    server = running("tiny-pool")
    with flood(server, users=8, prompt=300, output=300):
        run = judge(server, "preemption", "--time-limit", 5)
    assert "preemption" in run.names()
    assert run.evidence.traffic.preemptions > 0
    assert "other-traffic" in run.names("note") | run.names("unsure")
    saved = tmp_path / "metrics.txt"
    saved.write_text(httpx.get(f"{server.url}/metrics", trust_env=False).text, "utf-8")
    explained = doctor("--prometheus", saved, "--release", "0.32.0")
    assert explained.status in (1, 2)  # by how many of all requests it hit
    assert "Running requests are preempted" in explained.out
    assert "interval 0" in explained.out and "172 blocks" in explained.out


def test_release_0_28_flushes_as_it_ships(running):
    run = judge(running("0.28.0"), "stock-0.28.0")
    assert run.names() == {"session-flush"}
    assert run.status == 1
    assert run.evidence.server.version.startswith("0.28.0")
    commands = run.commands("session-flush")
    assert commands[0] == APPLY
    assert any("VLLM_PREFIX_CACHE_RETENTION_INTERVAL=0" in c for c in commands)
    check_bounds(run)
