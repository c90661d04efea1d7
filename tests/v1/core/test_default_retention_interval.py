# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The default interval, and what a first branch and a second session find."""

import json

import pytest

from vllm.config import CacheConfig, KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from .session_utils import ALIGNMENT, WIDE_WINDOW, Session, tokens

pytestmark = [pytest.mark.cpu_test, pytest.mark.skip_global_cleanup]

CHAT = tokens(0, 50_000)


@pytest.fixture
def interval() -> int | None:
    return CacheConfig().prefix_cache_retention_interval


def test_first_branch_hits_at_the_default_interval(interval):
    session = Session(interval)
    session.prefill(CHAT)
    fork = len(CHAT) // 2
    hit = session.prefill(CHAT[:fork] + tokens(2_000_000, fork))
    assert hit == fork // ALIGNMENT * ALIGNMENT == 24_832


def test_second_session_hits_the_system_prompt_at_the_default_interval(interval):
    session = Session(interval)
    system = tokens(3_000_000, 20_000)
    session.prefill(system + tokens(4_000_000, 3_000))
    hit = session.prefill(system + tokens(5_000_000, 3_000))
    assert hit == len(system) // ALIGNMENT * ALIGNMENT == 19_968


def test_edit_inside_the_last_alignment_block_hits_at_the_default_interval(interval):
    """Issue 57610: the tail of the window before the edit must still be there."""
    session = Session(interval, WIDE_WINDOW)
    prompt = CHAT[:5_000]
    session.prefill(prompt)
    hit = session.prefill(prompt[:-10] + tokens(2_000_000, 10))
    assert hit == (len(prompt) - 10) // 32 * 32 == 4_960


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
}
MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "hidden_size": 64,
    "num_hidden_layers": 1,
}


def resolved_interval(folder, config=LLAMA, **arguments) -> int | None:
    """The interval that an engine with these arguments runs with."""
    (folder / "config.json").write_text(json.dumps(config))
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, **arguments)
    return args.create_engine_config().cache_config.prefix_cache_retention_interval


@pytest.mark.parametrize(
    "store",
    [
        {"kv_transfer_config": KVTransferConfig("ExampleConnector", kv_role="kv_both")},
        {"kv_offloading_size": 1.0},
    ],
    ids=["connector", "offloading"],
)
def test_kv_store_gets_no_more_to_copy(store, tmp_path):
    """A store copies all that is retained: there None becomes 0."""
    assert resolved_interval(tmp_path) is None
    assert resolved_interval(tmp_path, **store) == 0
    sparse = resolved_interval(tmp_path, prefix_cache_retention_interval=512, **store)
    assert sparse == 512


def test_mamba_keeps_no_dense_states(tmp_path):
    """A dense checkpoint costs it a state per chunk: there None becomes 0."""
    arguments = dict(enable_prefix_caching=True, prefix_cache_retention_interval=None)
    assert resolved_interval(tmp_path, LLAMA, **arguments) is None
    assert resolved_interval(tmp_path, MAMBA, **arguments) == 0
