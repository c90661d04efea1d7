# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whole prefills on a real KV cache manager, one after the other."""

import itertools

import torch

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

CHUNK = 8192  # prompt tokens of one step


def group(
    spec_class, block_size: int, window: int | None = None
) -> kv.KVCacheGroupSpec:
    shape = dict(
        block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
    )
    if window is not None:
        shape["sliding_window"] = window
    return kv.KVCacheGroupSpec([f"{block_size}_{window}"], spec_class(**shape))


# DeepSeek-V4-Flash: compressed MLA, two SWA groups, two groups of compressor state.
DEEPSEEK_V4 = [
    group(kv.MLAAttentionSpec, 256),
    group(kv.SlidingWindowMLASpec, 64, 128),
    group(kv.SlidingWindowMLASpec, 64, 128),
    group(kv.SlidingWindowMLASpec, 8, 128),
    group(kv.SlidingWindowMLASpec, 4, 8),
]
ALIGNMENT = 256  # tokens between the hit boundaries of DEEPSEEK_V4
WIDE_WINDOW = [
    group(kv.FullAttentionSpec, 32),
    group(kv.SlidingWindowSpec, 16, 1024),
]


class Session:
    """A real KV cache manager, driven through whole prefills."""

    def __init__(
        self, interval: int | None, groups=DEEPSEEK_V4, num_blocks=20_000, **kwargs
    ):
        init_none_hash(sha256)
        block_sizes = [group.kv_cache_spec.block_size for group in groups]
        self.manager = KVCacheManager(
            kv.KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=groups,
                prefix_cache_retention_interval=interval,
            ),
            max_model_len=1_000_000,
            max_in_flight_tokens=CHUNK,
            scheduler_block_size=max(block_sizes),
            hash_block_size=min(block_sizes),
            **kwargs,
        )
        self.hasher = get_request_block_hasher(min(block_sizes), sha256)
        self.ids = itertools.count()

    def prefill(self, prompt: list[int], num_tokens: int | None = None) -> int:
        """Prefill a prompt, free it, and return how many tokens were cached.

        Args:
            prompt: The prompt.
            num_tokens: Abort it after so many tokens; None for its end.

        Returns:
            Prompt tokens found in the cache.

        """
        request = Request(
            request_id=str(next(self.ids)),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        manager = self.manager
        manager.new_step_starts()
        blocks, num_hit, junction = manager.get_computed_blocks(request)
        request.shared_prefix_boundary = junction
        num_computed, num_new_computed = num_hit, num_hit
        end = num_tokens or len(prompt)
        while num_computed < end:
            num_new = min(CHUNK, end - num_computed)
            assert manager.allocate_slots(request, num_new, num_new_computed, blocks)
            num_computed += num_new
            request.num_computed_tokens = num_computed
            num_new_computed, blocks = 0, None
        manager.free(request)
        return num_hit


def tokens(first: int, count: int) -> list[int]:
    return list(range(first, first + count))
