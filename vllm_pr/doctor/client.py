# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-compatible API, as far as the doctor needs it."""

import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx

from vllm_pr.doctor.errors import DoctorError
from vllm_pr.doctor.metrics import Snapshot, parse_wanted

Messages = list[dict[str, str]]
CONNECT_SECONDS = 10.0
# A server closes what is idle for 5 s, maybe just when the next request is sent.
NO_KEEP_ALIVE = httpx.Limits(max_keepalive_connections=0)


@dataclass
class Answer:
    """A streamed answer.

    Attributes:
        text: What was generated.
        token_ids: Its tokens, where the server was asked for them and gives them.
        prompt_tokens: Tokens of the prompt, None when the server does not say.
        cached_tokens: Those that came from the cache, None when it does not say.
        ttft_s: Seconds from sending to the first token.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_s: float = 0.0


class Api:
    """Asynchronous client of one server.

    Every failure is a `DoctorError` of one line. The key is sent as a header to this
    server alone and stands in no message.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        ca_file: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        """Args:
        url: Base URL; a trailing ``/v1`` is dropped.
        key: Bearer token.
        ca_file: PEM file of certificate authorities to trust instead of the usual.
        timeout: Seconds without a byte after which a request is given up.

        Raises:
            DoctorError: The URL is not an HTTP URL, or ``ca_file`` is no PEM file.
        """
        self.url = _base(url)
        self.model = ""
        self.endpoint = "chat"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._client = httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
                limits=NO_KEEP_ALIVE,
                verify=ssl.create_default_context(cafile=ca_file) if ca_file else True,
            )
        except (OSError, ssl.SSLError) as error:
            raise DoctorError(
                f"cannot read certificates from {ca_file}: {error}"
            ) from None

    async def close(self) -> None:
        """Close every connection: a request still running is thereby aborted."""
        await self._client.aclose()

    async def get(self, path: str) -> httpx.Response:
        """GET ``path``.

        Raises:
            DoctorError: No answer, or 401 or 403.
        """
        try:
            response = await self._client.get(path)
        except (httpx.HTTPError, ssl.SSLError) as error:
            raise DoctorError(explain(error, self.url)) from None
        self._refused(response.status_code)
        return response

    async def get_json(self, path: str) -> dict | None:
        """GET ``path`` as a JSON object, None when there is none."""
        response = await self.get(path)
        try:
            content = response.json() if response.status_code == 200 else None
        except ValueError:
            return None
        return content if isinstance(content, dict) else None

    async def metrics(self) -> Snapshot:
        """The server's metrics, empty when it gives none."""
        try:
            response = await self._client.get("/metrics", follow_redirects=True)
            return (
                parse_wanted(response.text)
                if response.status_code == 200
                else Snapshot()
            )
        except (httpx.HTTPError, ssl.SSLError, ValueError):
            return Snapshot()

    async def tokenize(self, messages: Messages) -> list[int] | None:
        """Tokens of the rendered prompt, None when the server does not tell."""
        try:
            response = await self._client.post("/tokenize", json=self._prompt(messages))
            return response.json()["tokens"] if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None

    async def ask(self, messages: Messages, **extra: object) -> Answer:
        """Have one token generated and streamed.

        Args:
            messages: The chat, or for a model without template one message of text.
            extra: More fields of the request.

        Raises:
            DoctorError: The server refused the request, or died while it ran.
        """
        body = {
            **self._prompt(messages),
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }
        path = "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"
        answer, sent = Answer(), time.monotonic()
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._refused(response.status_code, response.text)
                async for event in _events(response):
                    _take(answer, event, sent)
        except (httpx.HTTPError, ssl.SSLError) as error:
            raise DoctorError(explain(error, self.url, during=True)) from None
        answer.ttft_s = answer.ttft_s or time.monotonic() - sent
        return answer

    def _prompt(self, messages: Messages) -> dict:
        if self.endpoint == "chat":
            return {"model": self.model, "messages": messages}
        return {
            "model": self.model,
            "prompt": "\n".join(m["content"] for m in messages),
        }

    def _refused(self, status: int, text: str = "") -> None:
        if status in (401, 403):
            raise DoctorError(
                f"{self.url} answers {status}: it wants a key, or another one. Put it "
                "in "
                "an environment variable and name that with --api-key-env"
            )
        if status == 404 and text:
            raise DoctorError(
                f"{self.url} answers 404 for model {self.model!r}: {_detail(text)}. "
                "Name one that it serves with --model"
            )
        if status != 200 and text:
            raise DoctorError(
                f"{self.url} refuses the request ({status}): {_detail(text)}"
            )


async def _events(response: httpx.Response) -> AsyncIterator[dict]:
    """The JSON objects of a server-sent event stream."""
    async for line in response.aiter_lines():
        payload = line.removeprefix("data:").strip()
        if not line.startswith("data:") or payload == "[DONE]":
            continue
        try:
            event = json.loads(payload)
        except ValueError:
            raise DoctorError(
                f"not an event of the OpenAI API: {payload[:80]!r}"
            ) from None
        if "error" in event:
            raise DoctorError(
                f"the server stopped while the request ran: {_detail(payload)}"
            )
        yield event


def _take(answer: Answer, event: dict, sent: float) -> None:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = delta.get("content") or choice.get("text") or ""
        thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
        ids = choice.get("token_ids") or ()
        if (
            text or thought or ids or choice.get("finish_reason")
        ) and not answer.ttft_s:
            answer.ttft_s = time.monotonic() - sent
        answer.text += text
        answer.token_ids += ids
    if usage := event.get("usage"):
        answer.prompt_tokens = usage.get("prompt_tokens")
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens")


def explain(error: Exception, url: str, during: bool = False) -> str:
    """One line that says what went wrong with the connection, and what to do."""
    causes, cause = [], error
    while cause and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    text = " ".join(str(c) for c in causes)
    if any(isinstance(c, ssl.SSLError) for c in causes) or "SSL:" in text:
        return (
            f"{url}: TLS fails ({_reason(text)}): use http:// for a server without "
            "TLS, "
            "or name its certificate authority with --ca-file"
        )
    if isinstance(error, httpx.TimeoutException):
        return f"{url} does not answer in time: see whether it is up, or use --timeout"
    if during:
        return f"the server closed the connection while a request ran: see {url}'s log"
    if any(word in text for word in ("Name or service", "resolution", "nodename")):
        return f"no host of that name: {url}: check --url"
    return (
        f"nothing answers at {url} ({str(error) or type(error).__name__}): check --url"
    )


def _reason(text: str) -> str:
    start = text.find("[SSL")
    return text[start:].split("(_ssl")[0].strip() if start >= 0 else text[:100]


def _detail(text: str) -> str:
    """The message inside an error body, on one line."""
    try:
        body = json.loads(text)
        error = body.get("error", body)
        message = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        message = text
    return " ".join(str(message or text).split())[:300]


def _base(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise DoctorError(f"not a URL: {url!r} ({error})") from None
    if (parsed.port or 0) > 65535:
        raise DoctorError(f"not a URL: {url!r} (ports end at 65535)")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise DoctorError(f"not an HTTP URL: {url!r}: it should be http://HOST:PORT")
    if parsed.userinfo:
        raise DoctorError("no user or password in --url: use --api-key-env")
    return (
        str(parsed.copy_with(query=None, fragment=None)).rstrip("/").removesuffix("/v1")
    )
