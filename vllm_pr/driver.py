# SPDX-License-Identifier: Apache-2.0
"""Drive the real ``KVCacheManager`` of whatever vLLM release is on the path.

A scheduler's view of the prefix cache without an engine: look the prompt up, allocate
it chunk by chunk, decode, free. Nothing of vLLM is replaced; what differs between the
releases is which keywords a constructor takes, and `accepted` is the one place that
knows. ``vllm_pr.scenarios`` says what is run.
"""

import inspect
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from vllm.config import CacheConfig
from vllm.sampling_params import SamplingParams
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils, single_type_kv_cache_manager
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request, RequestStatus
from vllm_pr.scenarios import Geometry, Group

INTERVAL_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
DEFAULT = "default"
_ATTENTION = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
_LATENT = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.bfloat16}
_STATE = {"shapes": ((64,),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}
# By kind: name of the specification, its shape, and the keyword of its window.
_SPECS = {
    "full": ("FullAttentionSpec", _ATTENTION, ""),
    "sliding": ("SlidingWindowSpec", _ATTENTION, "sliding_window"),
    "mla": ("MLAAttentionSpec", _LATENT, ""),
    "sliding_mla": ("SlidingWindowMLASpec", _LATENT, "sliding_window"),
    "chunked_local": ("ChunkedLocalAttentionSpec", _ATTENTION, "attention_chunk_size"),
    "mamba": ("MambaSpec", _STATE, ""),
    "cross": ("CrossAttentionSpec", _ATTENTION, ""),
}


class OutOfBlocks(RuntimeError):
    """The pool cannot hold the next chunk of a request."""


@cache
def _parameters(function: Callable) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def accepted(target: Callable, **keywords: Any) -> dict[str, Any]:
    """The keywords that ``target`` takes in this release."""
    known = _parameters(getattr(target, "__func__", target))
    return {name: value for name, value in keywords.items() if name in known}


def fast_hash(value: Any) -> bytes:
    """A block hash that costs a fifth of pickling and SHA-256; 8 bytes.

    Python's own hash of the tuple (parent hash, token ids, extra keys): equal within
    one process, which is all that a simulation needs.
    """
    return hash(value).to_bytes(8, "little", signed=True)


def has_interval_field() -> bool:
    """Whether the retention interval lives in the configuration (0.29.0 on)."""
    name = "prefix_cache_retention_interval"
    return name in inspect.signature(kv_cache_interface.KVCacheConfig).parameters


def default_interval() -> int | None:
    """The retention interval of this release when the operator sets none."""
    return getattr(CacheConfig(), "prefix_cache_retention_interval", None)


def has_lookahead_hashes() -> bool:
    """Whether EAGLE is served by hashes that cover the next token (0.33.0 on)."""
    return "num_hash_lookahead_tokens" in inspect.signature(KVCacheManager).parameters


@contextmanager
def _interval_variable(interval: int | None) -> Iterator[None]:
    """Set the interval's environment variable; releases before 0.29.0 read it once."""
    before = os.environ.pop(INTERVAL_VARIABLE, None)
    if interval is not None:
        os.environ[INTERVAL_VARIABLE] = str(interval)
    try:
        yield
    finally:
        os.environ.pop(INTERVAL_VARIABLE, None)
        if before is not None:
            os.environ[INTERVAL_VARIABLE] = before


def _spec(group: Group) -> Any:
    name, shape, window = _SPECS[group.kind]
    keywords = {window: group.window} if window else {}
    kind = getattr(kv_cache_interface, name)
    return kind(block_size=group.block_size, **shape, **keywords)


def block_sizes(geometry: Geometry) -> tuple[int, int]:
    """Scheduler and hash block size, in tokens, as the releases resolve them.

    Least common multiple and greatest common divisor of the groups' block sizes.
    """
    sizes = [group.block_size for group in geometry.groups]
    return math.lcm(*sizes), math.gcd(*sizes)


def _register_specs() -> None:
    """From 0.23.0 on, the engine registers the managers of the specs at start-up."""
    register = getattr(single_type_kv_cache_manager, "register_all_kvcache_specs", None)
    if register is not None:
        register(vllm_config=None)


@dataclass
class Served:
    """One request, finished.

    Attributes:
        prompt_tokens: length of the prompt.
        cached_tokens: prompt tokens served from the prefix cache.
        peak_blocks: most blocks in use at once while it ran.
        steps: scheduler steps it took.
    """

    prompt_tokens: int
    cached_tokens: int
    peak_blocks: int = 0
    steps: int = 0


class Driver:
    """One pool and one ``KVCacheManager``, fed with requests.

    Args:
        geometry: the model's KV cache groups.
        blocks: size of the pool in blocks, null block included.
        interval: retention interval in tokens, None for dense checkpoints, or
            ``DEFAULT`` for what the release does when nobody sets it.
        eagle: whether an EAGLE/MTP drafter runs; every group is flagged.
        block_drop: with ``eagle``, drop the last matched block even where the release
            has lookahead hashes (0.33.0 does so beside a KV connector).
        chunk_tokens: most prompt tokens in one scheduler step.
        hash_function: hashes a block; `fast_hash` unless asked otherwise.
        **manager: further keywords for ``KVCacheManager``.

    Raises:
        ValueError: if the release refuses the interval for this geometry.
    """

    def __init__(
        self,
        geometry: Geometry,
        blocks: int,
        interval: int | None | str = DEFAULT,
        eagle: bool = False,
        block_drop: bool = False,
        chunk_tokens: int = 8192,
        hash_function: Callable[[Any], bytes] = fast_hash,
        **manager: Any,
    ) -> None:
        lookahead = eagle and not block_drop and has_lookahead_hashes()
        self.geometry = geometry
        self.chunk_tokens = chunk_tokens
        self.draft_tokens = 1 if eagle else 0
        self.interval = default_interval() if interval == DEFAULT else interval
        scheduler_block, hash_block = block_sizes(geometry)
        kv_cache_utils.init_none_hash(hash_function)
        _register_specs()
        with _interval_variable(None if has_interval_field() else self.interval):
            self.manager = self._manager(
                blocks,
                block_size=scheduler_block,
                scheduler_block_size=scheduler_block,
                hash_block_size=hash_block,
                use_eagle=eagle and not lookahead,
                num_hash_lookahead_tokens=int(lookahead),
                num_prefill_lookahead=int(eagle),
                **manager,
            )
        hasher = kv_cache_utils.get_request_block_hasher
        self.block_hasher = hasher(
            hash_block,
            hash_function,
            **accepted(hasher, num_hash_lookahead_tokens=int(lookahead)),
        )
        self._ids = itertools.count()

    def _manager(self, blocks: int, **keywords: Any) -> KVCacheManager:
        groups = [
            kv_cache_interface.KVCacheGroupSpec(
                layer_names=[f"layer.{index}"],
                kv_cache_spec=_spec(group),
                is_eagle_group=self.draft_tokens > 0,
            )
            for index, group in enumerate(self.geometry.groups)
        ]
        config = kv_cache_interface.KVCacheConfig
        keywords.setdefault("max_model_len", self.geometry.max_model_len)
        keywords["kv_cache_config"] = config(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            **accepted(config, prefix_cache_retention_interval=self.interval),
        )
        keywords["max_num_batched_tokens"] = self.chunk_tokens
        keywords["max_in_flight_tokens"] = self.chunk_tokens
        return KVCacheManager(**accepted(KVCacheManager, **keywords))

    @property
    def pool(self) -> Any:
        """The block pool."""
        return self.manager.block_pool

    @property
    def used_blocks(self) -> int:
        """Blocks that a request holds, null block not counted."""
        return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()

    def request(self, prompt: Sequence[int], request_id: str | None = None) -> Request:
        """A request for ``prompt``, its blocks hashed."""
        keywords = accepted(
            Request,
            request_id=request_id or f"request-{next(self._ids)}",
            prompt_token_ids=prompt if isinstance(prompt, list) else list(prompt),
            sampling_params=SamplingParams(max_tokens=1 << 20),
            pooling_params=None,
            eos_token_id=None,
            block_hasher=self.block_hasher,
        )
        return Request(**keywords)

    def run(self, prompt: Sequence[int], output: Sequence[int] = ()) -> Served:
        """Serve one request to its end, alone.

        Args:
            prompt: token ids.
            output: token ids that the model will have sampled, at least one is.

        Raises:
            OutOfBlocks: if the pool cannot hold it; its blocks are freed.
        """
        request = self.request(prompt)
        served = Served(request.num_prompt_tokens, 0)
        for _ in self.steps(request, output, served):
            served.steps += 1
            served.peak_blocks = max(served.peak_blocks, self.used_blocks)
        return served

    def steps(
        self,
        request: Request,
        output: Sequence[int] = (),
        served: Served | None = None,
    ) -> Iterator[int]:
        """Serve a request step by step: yields the tokens scheduled in each.

        Several of these, advanced in turn, are several requests at once. Closing one
        early aborts the request: its blocks are freed.
        """
        try:
            yield self._admit(request, served)
            while request.num_computed_tokens < request.num_prompt_tokens:
                yield self._schedule(request, request.num_prompt_tokens)
            yield from self._decode(request, list(output) or [0])
        finally:
            self.manager.free(request)

    def _admit(self, request: Request, served: Served | None) -> int:
        """Look the prompt up and schedule its first chunk."""
        found = self.manager.get_computed_blocks(request)
        blocks, cached = found[0], found[1]
        if len(found) > 2:
            request.shared_prefix_boundary = found[2]
        if served is not None:
            served.cached_tokens = cached
        tokens = min(request.num_tokens - cached, self.chunk_tokens)
        self._allocate(
            request,
            tokens,
            num_new_computed_tokens=cached,
            new_computed_blocks=blocks,
            full_sequence_must_fit=True,
            has_scheduled_reqs=False,
        )
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = cached + tokens
        return tokens

    def _schedule(self, request: Request, end: int) -> int:
        """Schedule the tokens up to ``end``, at most one chunk."""
        tokens = min(end - request.num_computed_tokens, self.chunk_tokens)
        self._allocate(request, tokens)
        request.num_computed_tokens += tokens
        return tokens

    def _decode(self, request: Request, output: list[int]) -> Iterator[int]:
        """Sample ``output``; each draft token is accepted."""
        request.append_output_token_ids(output[:1])
        position = 1
        while position < len(output):
            drafts = min(self.draft_tokens, len(output) - position - 1)
            scheduled = self._schedule(request, request.num_tokens + drafts)
            request.append_output_token_ids(output[position : position + drafts + 1])
            position += drafts + 1
            yield scheduled

    def _allocate(self, request: Request, tokens: int, **keywords: Any) -> None:
        allocate = self.manager.allocate_slots
        if hasattr(self.manager, "new_step_starts"):
            self.manager.new_step_starts()
        keywords = accepted(
            allocate, num_lookahead_tokens=self.draft_tokens, **keywords
        )
        if allocate(request, tokens, **keywords) is None:
            raise OutOfBlocks(
                f"{request.request_id}: no room for {tokens} more tokens after "
                f"{request.num_computed_tokens}: {self.pool.get_num_free_blocks()} of "
                f"{self.pool.num_gpu_blocks} blocks are free"
            )
