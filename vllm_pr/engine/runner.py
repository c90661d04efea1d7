# SPDX-License-Identifier: Apache-2.0
"""A real engine in a process of its own, driven from here.

One environment holds one vLLM, so stock and changed run side by side only in different
processes. Example::

    with start_engine("gemma3-tiny", "stock-default") as engine:
        prompt = engine.render([{"role": "user", "content": "..."}])
        print(engine.ask(prompt).cached_tokens)
"""

import json
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_pr.engine import processes
from vllm_pr.engine.models import TinyModel, check_model_folder, tiny_model
from vllm_pr.engine.processes import EngineError
from vllm_pr.engine.variants import plan_launch, variant_named

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Result:
    """What the engine says about one request.

    Attributes:
        prompt_tokens: Length of the prompt.
        cached_tokens: Prompt tokens served from the prefix cache.
        ttft_s: Seconds from adding the request to its first token.
        tokens: Sampled token ids.
        logprobs: For each sampled token, log probabilities by token id; empty unless
            asked for.
    """

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]


@dataclass(frozen=True)
class EngineInfo:
    """What runs.

    Attributes:
        release: vLLM's own version.
        package: Folder it was imported from.
        blocks: Blocks of the pool.
        caching: Whether prefix caching is on.
        interval: The resolved retention interval in tokens, None for dense; None too
            where the release has no such setting.
        group_block_sizes: Tokens per block of each KV cache group.
    """

    release: str
    package: str
    blocks: int
    caching: bool
    interval: int | None
    group_block_sizes: tuple[int, ...]


class Engine:
    """A running engine; made by ``start_engine``."""

    def __init__(
        self,
        model: TinyModel,
        process: subprocess.Popen,
        channel,
        log: Path,
        on_progress: Progress | None = None,
    ) -> None:
        self.model = model
        self.process = process
        self.log = log
        self.on_progress = on_progress
        self.info: EngineInfo | None = None
        self._channel = channel

    def render(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a chat, through the model's chat template."""
        return self._do("render", messages=list(messages))

    def ask(
        self, prompt: Sequence[int], max_tokens: int = 1, logprobs: int | None = None
    ) -> Result:
        """Send one prompt of token ids, greedily sample ``max_tokens`` tokens."""
        return self.ask_all([prompt], max_tokens, logprobs)[0]

    def ask_all(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | Sequence[int] = 1,
        logprobs: int | None = None,
    ) -> list[Result]:
        """Send several prompts at once; ``max_tokens`` may differ for each."""
        if isinstance(max_tokens, int):
            max_tokens = [max_tokens] * len(prompts)
        results = self._do(
            "ask",
            prompts=[list(prompt) for prompt in prompts],
            max_tokens=list(max_tokens),
            logprobs=logprobs,
        )
        return [
            Result(
                **result
                | {
                    "tokens": tuple(result["tokens"]),
                    "logprobs": tuple(map(dict, result["logprobs"])),
                }
            )
            for result in results
        ]

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks.

        Raises:
            EngineError: The engine refused, because requests are running.
        """
        if not self._do("reset_prefix_cache"):
            raise EngineError("the engine did not reset its prefix cache")

    def call(self, function: str, **arguments) -> Any:
        """Call ``module:function`` in the engine's process.

        Args:
            function: It gets the ``vllm_pr.engine.worker.Worker`` first.
            arguments: Further arguments, as JSON.

        Returns:
            What the function returns, as JSON.
        """
        return self._do("call", function=function, arguments=arguments)

    def start(self, engine_args: dict[str, Any]) -> None:
        """Start the engine in its process; ``start_engine`` does it."""
        info = self._do("start", engine_args=engine_args)
        sizes = tuple(info.pop("group_block_sizes"))
        self.info = EngineInfo(**info, group_block_sizes=sizes)

    def _do(self, action: str, **arguments) -> Any:
        try:
            self._channel.write(json.dumps({"do": action, **arguments}) + "\n")
            self._channel.flush()
            return self._answer()
        except (BrokenPipeError, ConnectionResetError):
            raise self._died() from None

    def _answer(self) -> Any:
        for line in self._channel:
            message = json.loads(line)
            if "answer" in message:
                return message["answer"]
            if "error" in message:
                raise EngineError(f"{message['error']} (log: {self.log})")
            if self.on_progress:
                done, total = message.get("done", 0), message.get("total", 0)
                self.on_progress(message["progress"], done, total)
        raise self._died()

    def _died(self) -> EngineError:
        reason = processes.last_error(self.log)
        return EngineError(f"the engine's process ended: {reason} (log: {self.log})")


@contextmanager
def start_engine(
    model: str,
    variant: str = "stock-default",
    tree: Path | None = None,
    *,
    blocks: int | None = None,
    engine_args: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    on_progress: Progress | None = None,
) -> Iterator[Engine]:
    """Start an engine, stop it at the end.

    Args:
        model: A tiny model, see ``vllm_pr.engine.models.MODELS``.
        variant: A setting, see ``vllm_pr.engine.variants.VARIANTS``.
        tree: Folder with the ``vllm`` package to run; default as for the variant.
        blocks: Blocks of the pool; None for the model's own number.
        engine_args: Keyword arguments of ``vllm.EngineArgs`` on top.
        env: Environment variables on top.
        on_progress: Called with what the engine does, and the prompt tokens done and
            wanted (both 0 while it starts).

    Raises:
        ValueError: Unknown model or variant, no vLLM in ``tree``, or no model in the
            folder that ``engine_args`` names.
        EngineError: The engine did not start.
    """
    tiny = tiny_model(model)
    launch = plan_launch(tiny, variant_named(variant), tree, blocks, env)
    arguments = launch.engine_args | (engine_args or {})
    check_model_folder(arguments["model"])
    log = processes.log_path("engine", model, variant)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = processes.start(
            "vllm_pr.engine.worker",
            [str(theirs.fileno())],
            {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **launch.env},
            log,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        try:
            channel = ours.makefile("rw", encoding="utf-8")
            engine = Engine(tiny, process, channel, log, on_progress)
            engine.start(arguments)
            yield engine
        finally:
            processes.stop(process)
