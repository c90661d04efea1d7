# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A session comes back after another one has prefilled, on a hybrid model.

Sliding-window layers take and give back blocks for every token. Dense checkpoints
(retention interval None) give a hash to a fifth of them, so on a single LRU list the
prefill of one long chat pushes every other chat out of a pool that is nearly empty.
"""

import itertools

import pytest
import torch

from vllm.config import CacheConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

pytestmark = pytest.mark.cpu_test

CHUNK = 8192  # prompt tokens of one step


def group(spec_class, block_size: int, window: int | None = None) -> KVCacheGroupSpec:
    shape = dict(
        block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
    )
    if window is not None:
        shape["sliding_window"] = window
    return KVCacheGroupSpec([f"{block_size}_{window}"], spec_class(**shape))


# DeepSeek-V4-Flash: compressed MLA, two SWA groups, two groups of compressor state.
DEEPSEEK_V4 = [
    group(MLAAttentionSpec, 256),
    group(SlidingWindowMLASpec, 64, 128),
    group(SlidingWindowMLASpec, 64, 128),
    group(SlidingWindowMLASpec, 8, 128),
    group(SlidingWindowMLASpec, 4, 8),
]
ALIGNMENT = 256  # tokens between the hit boundaries of DEEPSEEK_V4
WIDE_WINDOW = [
    group(FullAttentionSpec, 32),
    group(SlidingWindowSpec, 16, 1024),
]


class Session:
    """A real KV cache manager, driven through whole prefills."""

    def __init__(self, interval: int | None, groups=DEEPSEEK_V4, num_blocks=20_000):
        init_none_hash(sha256)
        block_sizes = [group.kv_cache_spec.block_size for group in groups]
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=groups,
                prefix_cache_retention_interval=interval,
            ),
            max_model_len=1_000_000,
            max_in_flight_tokens=CHUNK,
            scheduler_block_size=max(block_sizes),
            hash_block_size=min(block_sizes),
        )
        self.hasher = get_request_block_hasher(min(block_sizes), sha256)
        self.ids = itertools.count()

    def prefill(self, prompt: list[int]) -> int:
        """Prefill a prompt, free it, and return how many tokens were cached."""
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
        while num_computed < len(prompt):
            num_new = min(CHUNK, len(prompt) - num_computed)
            assert manager.allocate_slots(request, num_new, num_new_computed, blocks)
            num_computed += num_new
            request.num_computed_tokens = num_computed
            num_new_computed, blocks = 0, None
        manager.free(request)
        return num_hit


def tokens(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


A = tokens(0, 250_000)
B = tokens(1_000_000, 250_000)
RESEND = (len(A) - 1) // ALIGNMENT * ALIGNMENT


def test_session_survives_the_prefill_of_another():
    session = Session(interval=None)
    assert session.prefill(A) == 0
    assert session.prefill(A) == RESEND
    assert session.prefill(B) == 0
    assert session.prefill(A) == RESEND == 249_856


def test_branch_off_the_middle_survives_the_prefill_of_another():
    session = Session(interval=None)
    session.prefill(A)
    session.prefill(B)
    # As the pool fills, checkpoints thin out to every 512, 1,024, ... tokens.
    fork = 128 * ALIGNMENT
    assert session.prefill(A[:fork] + tokens(2_000_000, 1_000)) == fork
    assert session.prefill(A) == RESEND


def test_system_prompt_survives_the_prefill_of_another():
    session = Session(interval=None)
    system = tokens(3_000_000, 80 * ALIGNMENT)
    session.prefill(system + tokens(4_000_000, 2_500))
    session.prefill(B)
    assert session.prefill(system + tokens(5_000_000, 2_500)) == len(system)


def test_first_branch_hits_at_the_default_interval():
    session = Session(CacheConfig().prefix_cache_retention_interval)
    chat = A[:50_000]
    session.prefill(chat)
    fork = len(chat) // 2
    hit = session.prefill(chat[:fork] + tokens(2_000_000, fork))
    assert hit == fork // ALIGNMENT * ALIGNMENT == 24_832


def test_second_session_hits_the_system_prompt_at_the_default_interval():
    session = Session(CacheConfig().prefix_cache_retention_interval)
    system = tokens(3_000_000, 20_000)
    session.prefill(system + tokens(4_000_000, 3_000))
    hit = session.prefill(system + tokens(5_000_000, 3_000))
    assert hit == len(system) // ALIGNMENT * ALIGNMENT == 19_968


def test_edit_inside_the_last_alignment_block_hits_at_the_default_interval():
    """Issue 57610: the tail of the window before the edit must still be there."""
    session = Session(CacheConfig().prefix_cache_retention_interval, WIDE_WINDOW)
    prompt = A[:5_000]
    session.prefill(prompt)
    hit = session.prefill(prompt[:-10] + tokens(2_000_000, 10))
    assert hit == (len(prompt) - 10) // 32 * 32 == 4_960
