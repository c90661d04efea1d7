# SPDX-License-Identifier: Apache-2.0
"""``vllm-pr serve``: vLLM's own server of a tiny model, until it is stopped."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil
import pytest
from doctor_kit import closed_port, one_line, wait_for
from typer.testing import CliRunner

from vllm_pr.cli import app

SCRIPT = [sys.executable, "-c", "from vllm_pr.cli import main; main()", "serve"]


@contextmanager
def serving(
    *words: str,
) -> Iterator[tuple[subprocess.Popen, str, list[psutil.Process]]]:
    """The command while it serves: its process, the URL, the server's processes."""
    port = closed_port()
    with subprocess.Popen(
        [*SCRIPT, "--port", str(port), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            about, log, advice = (process.stdout.readline() for _ in range(3))
            url = re.search(r"http://\S+", about)[0]
            assert url == f"http://127.0.0.1:{port}"
            assert f"vllm-pr doctor --url {url}" in advice
            assert log.startswith("log: ")
            yield process, url, psutil.Process(process.pid).children(recursive=True)
        finally:
            process.kill()


def test_serves_until_it_is_stopped():
    with serving("--variant", "stock-none") as (process, url, children):
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
        assert one_line(process.stderr.read()) == "vllm-pr serve: stopped"
    assert 'prefix_cache_retention_interval="None"' in metrics
    assert 'num_gpu_blocks="268"' in metrics
    assert len(children) >= 3  # the API server, the engine core, its worker
    wait_for(lambda: not any(child.is_running() for child in children))


def test_a_server_that_ends_by_itself_is_told():
    with serving("--variant", "changed", "--blocks", "300") as (process, url, children):
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
        children[0].kill()
        assert process.wait() == 2
        assert "the server ended: " in one_line(process.stderr.read())
    assert 'prefix_cache_retention_interval="None"' in metrics
    assert 'num_gpu_blocks="300"' in metrics
    wait_for(lambda: not any(child.is_running() for child in children))


def test_bad_input_starts_nothing(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, says in (
            (["--model", "large"], "unknown model 'large': there is "),
            (["--variant", "best"], "unknown variant 'best': there is "),
            (["--port", port], f"port {port} of 127.0.0.1: Address already in use"),
        ):
            done = CliRunner().invoke(app, ["serve", *words])
            assert done.exit_code == 2
            assert says in one_line(done.stderr)


def test_a_pool_too_small_says_what_to_do():
    words = ["serve", "--blocks", "40", "--port", str(closed_port())]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "give --blocks a larger number" in one_line(done.stderr)
