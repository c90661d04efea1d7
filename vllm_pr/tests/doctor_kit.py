# SPDX-License-Identifier: Apache-2.0
"""Run ``vllm-pr doctor`` as a user does, and stand in for engines that are not vLLM."""

import asyncio
import json
import os
import pty
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from vllm_pr.doctor.client import NO_KEEP_ALIVE
from vllm_pr.doctor.evidence import Evidence, from_json
from vllm_pr.engine.server import Server

COMMAND = [str(Path(sys.executable).with_name("vllm-pr")), "doctor"]


@dataclass
class Run:
    """A finished run of the doctor."""

    status: int
    out: str
    err: str
    content: dict = field(default_factory=dict)

    @property
    def evidence(self) -> Evidence:
        return from_json(json.dumps(self.content["evidence"]))

    def names(self, severity: str = "fault") -> set[str]:
        """Findings of one severity."""
        found = self.content["findings"]
        return {f["name"] for f in found if f["severity"] == severity}

    def commands(self, name: str) -> list[str]:
        """Remedies of one finding."""
        finding = next(f for f in self.content["findings"] if f["name"] == name)
        return [remedy["run"] for remedy in finding["remedy"]]


@contextmanager
def started(
    *words: object, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    """The doctor without a terminal; ended at the end, should it still run."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def doctor(
    *words: object, env: dict[str, str] | None = None, json_file: Path | None = None
) -> Run:
    """Run the doctor to its end."""
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.unlink(missing_ok=True)
        words = (*words, "--json", json_file)
    with started(*words, env=env) as process:
        out, err = process.communicate()
    written = json_file is not None and json_file.exists()
    content = json.loads(json_file.read_text("utf-8")) if written else {}
    return Run(process.returncode, out, err, content)


def doctor_on_terminal(*words: object, answer: str = "") -> tuple[int, str]:
    """Run the doctor on a terminal of its own; exit status and all that it wrote."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *map(str, words)],
        stdin=child,
        stdout=child,
        stderr=child,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"},
        start_new_session=True,
    )
    os.close(child)
    if answer:
        os.write(parent, answer.encode())
    written = b""
    while True:
        try:
            chunk = os.read(parent, 65536)
        except OSError:
            break
        if not chunk:
            break
        written += chunk
    os.close(parent)
    return process.wait(), written.decode("utf-8", "replace")


def closed_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def one_line(text: str) -> str:
    """The text, which has to be one line and no traceback."""
    assert text.count("\n") == 1 and text.endswith("\n"), text
    assert "Traceback" not in text
    return text.strip()


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Poll until ``condition`` holds.

    Raises:
        TimeoutError: It did not hold in time.
    """
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"not so after {seconds:.0f} s")
        time.sleep(0.05)


@contextmanager
def flood(
    server: Server, users: int, prompt: int, output: int, key: str = ""
) -> Iterator[None]:
    """Other clients: each sends one new prompt after another until the end.

    Args:
        server: The server.
        users: How many at once.
        prompt: Characters of each prompt.
        output: Tokens of each answer.
        key: The server's key.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    stop = threading.Event()
    served = threading.Semaphore(0)

    def user(number: int) -> None:
        client = httpx.Client(
            base_url=server.url, headers=headers, timeout=600, trust_env=False
        )
        with client:
            count = 0
            while not stop.is_set():
                text = f"user {number} asks {count}: ".ljust(prompt, "x")
                body = {
                    "model": server.model,
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": output,
                    "ignore_eos": True,
                }
                client.post("/v1/chat/completions", json=body).raise_for_status()
                served.release()
                count += 1

    threads = [threading.Thread(target=user, args=(n,)) for n in range(users)]
    for thread in threads:
        thread.start()
    try:
        assert served.acquire(timeout=300), "the flood does not get through"
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@dataclass
class OtherEngine:
    """An engine that is not vLLM, behind the same API.

    It caches by characters: a prompt hits as far as an earlier one began the same.

    Attributes:
        model: The model that it serves.
        context: Its ``max_model_len``; None to tell none.
        models: What it lists instead of its model.
        reports: Whether usage tells cached tokens.
        key: Key that it wants.
        fail: What to do with a completion: "" to answer it, "404", "500", "garbage",
            "error-event", "hang", or "die" to close the connection in the middle.
        fail_after: Completions answered before that.
        asked: Prompts received.
        hung_up: Whether a client closed the connection while the engine hung.
    """

    model: str = "other-model"
    context: object = None
    models: object = ...
    reports: bool = False
    key: str | None = None
    fail: str = ""
    fail_after: int = 0
    asked: list[str] = field(default_factory=list)
    hung_up: bool = False

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    def _refuses(self, request: Request) -> Response | None:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": "who are you?"}, 401)
        return None

    async def _models(self, request: Request) -> Response:
        card = {"id": self.model, "object": "model", "owned_by": "somebody"}
        if self.context:
            card["max_model_len"] = self.context
        models = [card] if self.models is ... else self.models
        return self._refuses(request) or JSONResponse({"data": models})

    async def _chat(self, request: Request) -> Response:
        if refusal := self._refuses(request):
            return refusal
        body = await request.json()
        prompt = "\n".join(f"{m['role']}: {m['content']}" for m in body["messages"])
        failing = bool(self.fail) and len(self.asked) >= self.fail_after
        cached = max((_common(prompt, old) for old in self.asked), default=0)
        self.asked.append(prompt)
        if failing and self.fail == "404":
            return JSONResponse({"error": {"message": "no such model"}}, 404)
        if failing and self.fail == "500":
            return JSONResponse({"error": {"message": "out of\nluck"}}, 500)
        events = self._events(prompt, cached, self.fail if failing else "")
        return StreamingResponse(events, media_type="text/event-stream")

    async def _events(self, prompt: str, cached: int, fail: str):
        if fail == "hang":
            try:
                await asyncio.sleep(3600)
            finally:
                self.hung_up = True
        if fail == "garbage":
            yield "data: <html>\n\n"
        if fail == "error-event":
            yield 'data: {"error": {"message": "engine is gone"}}\n\n'
        yield 'data: {"choices": [{"index": 0, "delta": {"content": "Yes"}}]}\n\n'
        if fail == "die":
            raise ConnectionAbortedError("as a server that dies")
        usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": 1}
        if self.reports:
            usage["prompt_tokens_details"] = {"cached_tokens": cached // 4}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"


class Proxy:
    """Forwards to a server, all but some paths.

    Args:
        url: The server.
        hidden: Paths that it answers with 404.
        delay: Seconds that a completion waits before it is forwarded.
        count: Whether to put the number of messages before the first one, as a
            template does that is not prefix-stable.

    Attributes:
        asked: Set once a completion has come in.
    """

    def __init__(
        self, url: str, *hidden: str, delay: float = 0.0, count: bool = False
    ) -> None:
        self._client = httpx.AsyncClient(
            base_url=url, timeout=600, trust_env=False, limits=NO_KEEP_ALIVE
        )
        self._hidden = hidden
        self._delay = delay
        self._count = count
        self.asked = threading.Event()

    def app(self) -> Starlette:
        """The ASGI application."""
        methods = ["GET", "POST"]
        return Starlette(routes=[Route("/{path:path}", self._forward, methods=methods)])

    async def _forward(self, request: Request) -> Response:
        if request.url.path in self._hidden:
            return Response("not for you", 404)
        if request.url.path.endswith("/completions"):
            self.asked.set()
            await asyncio.sleep(self._delay)
        names = ("authorization", "content-type")
        sent = self._client.build_request(
            request.method,
            request.url.path,
            content=self._counted(await request.body()),
            headers={n: v for n, v in request.headers.items() if n in names},
        )
        answer = await self._client.send(sent, stream=True)
        return StreamingResponse(
            answer.aiter_raw(),
            answer.status_code,
            media_type=answer.headers.get("content-type"),
        )

    def _counted(self, body: bytes) -> bytes:
        if not self._count or not body:
            return body
        content = json.loads(body)
        first = content["messages"][0]
        first["content"] = f"{len(content['messages'])} messages: {first['content']}"
        return json.dumps(content).encode()


def _common(left: str, right: str) -> int:
    return len(os.path.commonprefix([left, right]))


@contextmanager
def served(engine: OtherEngine | Proxy, **uvicorn_options: object) -> Iterator[str]:
    """The engine on loopback, in a thread; yields HOST:PORT."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            engine.app(), log_level="critical", lifespan="off", **uvicorn_options
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        wait_for(lambda: server.started, 30)
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.force_exit = server.should_exit = True
            thread.join(30)
