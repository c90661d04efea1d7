# SPDX-License-Identifier: Apache-2.0
"""One engine, driven by its parent: ``python -m vllm_pr.engine.worker FD``.

FD is a socket, a message one line of JSON. The parent sends ``{"do": NAME, ...}`` and
reads lines until one has the key ``answer`` or ``error``; lines with the key
``progress`` come in between. The first message is ``start``. The engine core runs in
this process, so that there is one process to stop, and a call can reach the scheduler
and the KV cache.
"""

import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

from vllm_pr.engine.processes import die_with_parent


class Worker:
    """Answers its parent's messages."""

    def __init__(self, channel) -> None:
        self._channel = channel
        self.llm: Any = None

    @property
    def engine(self):
        """The ``LLMEngine``."""
        return self.llm.llm_engine

    @property
    def core(self):
        """The ``EngineCore``, with ``scheduler`` and ``model_executor``."""
        return self.engine.engine_core.engine_core

    def send(self, **message) -> None:
        self._channel.write(json.dumps(message) + "\n")
        self._channel.flush()

    def serve(self) -> None:
        """Answer until the parent closes the socket."""
        for line in self._channel:
            message = json.loads(line)
            action = getattr(self, "do_" + message.pop("do"))
            try:
                self.send(answer=action(**message))
            except Exception as error:
                traceback.print_exc()
                self.send(error=_one_line(error), kind=type(error).__name__)

    def do_start(self, engine_args: dict[str, Any]) -> dict[str, Any]:
        self.send(progress="importing vLLM")
        import vllm

        self.send(progress="loading the model")
        self.llm = vllm.LLM(**engine_args, disable_log_stats=False)
        config = self.core.vllm_config.cache_config
        manager = self.core.scheduler.kv_cache_manager
        return {
            "release": vllm.__version__,
            "package": os.path.dirname(vllm.__file__),
            "blocks": config.num_gpu_blocks,
            "caching": bool(config.enable_prefix_caching),
            "interval": getattr(config, "prefix_cache_retention_interval", None),
            "group_block_sizes": [
                group.kv_cache_spec.block_size
                for group in manager.kv_cache_config.kv_cache_groups
            ],
        }

    def do_render(self, messages: list[dict[str, str]]) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return tokenizer.encode(text, add_special_tokens=False)

    def do_ask(
        self, prompts: list[list[int]], max_tokens: list[int], logprobs: int | None
    ) -> list[dict[str, Any]]:
        pending = {}
        for i, (prompt, limit) in enumerate(zip(prompts, max_tokens, strict=True)):
            self._add(str(i), prompt, limit, logprobs)
            pending[str(i)] = time.perf_counter()
        first_token: dict[str, float] = {}
        finished = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                name, now = output.request_id, time.perf_counter()
                if output.outputs[0].token_ids:
                    first_token.setdefault(name, now - pending[name])
                if output.finished:
                    finished[name] = _result(output, first_token[name])
            self._report_progress()
        return [finished[name] for name in pending]

    def do_reset_prefix_cache(self) -> bool:
        return self.engine.reset_prefix_cache()

    def do_call(self, function: str, arguments: dict[str, Any]) -> Any:
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(self, **arguments)

    def _add(
        self, name: str, prompt: list[int], limit: int, logprobs: int | None
    ) -> None:
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(
            temperature=0.0, max_tokens=limit, logprobs=logprobs, ignore_eos=True
        )
        self.engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)

    def _report_progress(self) -> None:
        requests = self.core.scheduler.requests.values()
        done = sum(request.num_computed_tokens for request in requests)
        total = sum(request.num_prompt_tokens for request in requests)
        self.send(progress="prefilling", done=done, total=total)


def _result(output, ttft: float) -> dict[str, Any]:
    sampled = output.outputs[0]
    logprobs = [
        [[token, entry.logprob] for token, entry in position.items()]
        for position in sampled.logprobs or ()
    ]
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens or 0,
        "ttft_s": ttft,
        "tokens": list(sampled.token_ids),
        "logprobs": logprobs,
    }


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL)
    with socket.socket(fileno=int(sys.argv[1])) as link:
        Worker(link.makefile("rw", encoding="utf-8")).serve()
