# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` of a tiny model on loopback, as a context manager."""

import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from vllm_pr.engine import processes
from vllm_pr.engine.models import tiny_model
from vllm_pr.engine.processes import EngineError
from vllm_pr.engine.variants import command_line, plan_launch, variant_named

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: Base URL without ``/v1``.
        model: The model's name in requests.
        log: Output of all its processes.
        process: The API server process; the engine's processes are its children.
        release: The vLLM release that runs, as ``0.32.0``.
    """

    url: str
    model: str
    log: Path
    process: subprocess.Popen
    release: str


@contextmanager
def serve(
    model: str = "gemma3-tiny",
    variant: str = "stock-default",
    extra_args: Sequence[str] = (),
    tree: Path | None = None,
    *,
    blocks: int | None = None,
    env: dict[str, str] | None = None,
    port: int = 0,
    timeout: float = 300.0,
    on_wait: Callable[[float, str], None] | None = None,
) -> Iterator[Server]:
    """Start a server, wait until it is healthy, stop it at the end.

    Args:
        model: A tiny model, see ``vllm_pr.engine.models.MODELS``.
        variant: A setting, see ``vllm_pr.engine.variants.VARIANTS``.
        extra_args: Words for ``vllm serve``, after all others.
        tree: Folder with the ``vllm`` package to run; default as for the variant.
        blocks: Blocks of the pool; None for the model's own number.
        env: Environment variables on top.
        port: Port to listen on; 0 for any that is free.
        timeout: Seconds until the server must be healthy.
        on_wait: Called about twice a second with the seconds waited so far and the
            last line of the log.

    Raises:
        ValueError: Unknown model or variant, or no vLLM in ``tree``.
        EngineError: The port is taken, or the server died or was not healthy in time.
    """
    launch = plan_launch(tiny_model(model), variant_named(variant), tree, blocks, env)
    port = _free_port(port)
    arguments = [
        *command_line(launch.engine_args),
        *("--host", HOST, "--port", str(port), "--served-model-name", model),
        "--enable-prompt-tokens-details",
        *extra_args,
    ]
    log = processes.log_path("serve", model, variant)
    process = processes.start(
        "vllm_pr.engine.serve_main",
        arguments,
        {**launch.env, "VLLM_SERVER_DEV_MODE": "1"},
        log,
    )
    try:
        url = f"http://{HOST}:{port}"
        _wait_until_healthy(url, process, log, timeout, on_wait)
        yield Server(url, model, log, process, launch.release)
    finally:
        processes.stop(process)


def _free_port(wanted: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted))
        except OSError as error:
            raise EngineError(
                f"cannot listen on port {wanted} of {HOST}: {error.strerror}"
            ) from error
        return probe.getsockname()[1]


def _wait_until_healthy(
    url: str,
    process: subprocess.Popen,
    log: Path,
    timeout: float,
    on_wait: Callable[[float, str], None] | None,
) -> None:
    started = time.monotonic()
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while (waited := time.monotonic() - started) < timeout:
            if process.poll() is not None:
                raise EngineError(
                    f"the server ended before it was healthy: "
                    f"{processes.last_error(log)} (log: {log})"
                )
            if on_wait:
                on_wait(waited, processes.last_line(log))
            if _healthy(client, url):
                return
            time.sleep(0.5)
    raise EngineError(f"the server was not healthy after {timeout:.0f} s (log: {log})")


def _healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
