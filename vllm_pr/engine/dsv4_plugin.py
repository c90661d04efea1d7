# SPDX-License-Identifier: Apache-2.0
"""What DeepSeek-V4 needs to run on a CPU, in the engine's own processes only."""

import importlib
from unittest import mock

import torch


def register() -> None:
    """Add missing operators, and mend what keeps the model off this processor."""
    from vllm.platforms import current_platform
    from vllm_pr.engine import dsv4_kernels

    current_platform.import_kernels()
    dsv4_kernels.define_missing()
    _keep_prefix_caching(type(current_platform))
    _complete_tile_schedule()
    _skip_window_indices()


def _keep_prefix_caching(platform) -> None:
    """Without AMX the platform turns chunked prefill and prefix caching off.

    It takes DeepSeek-V4's operators for missing there; they are not, see
    ``dsv4_kernels``.
    """
    stock = platform.check_and_update_config.__func__
    if getattr(stock, "keeps_prefix_caching", False):
        return

    def check_and_update_config(cls, vllm_config) -> None:
        with mock.patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True):
            stock(cls, vllm_config)

    check_and_update_config.keeps_prefix_caching = True
    platform.check_and_update_config = classmethod(check_and_update_config)


class _NoPlan(dict):
    """No tile-scheduler plan, whatever the layer type."""

    def __missing__(self, layer_type: str) -> None:
        return None


def _complete_tile_schedule() -> None:
    """The CPU builder's plan lacks layer types that its caller asks for."""
    module = importlib.import_module("vllm.models.deepseek_v4.cpu.cpu_mla")
    builder = module.DeepseekV4CPUSparseSWAMetadataBuilder
    builder.build_tile_scheduler = lambda self, num_decode_tokens: _NoPlan()


def _skip_window_indices() -> None:
    """Do not interpret the kernel that lists each token's window.

    It takes 25 ms a token, and the CPU attention derives its windows from the
    positions; the lists are left empty, so that a reader would see nothing.
    """
    module = importlib.import_module("vllm.v1.attention.backends.mla.sparse_swa")

    def leave_empty(indices, lengths, *args, **kwargs) -> None:
        indices.fill_(-1)
        lengths.zero_()

    leave_empty.register_warmup = lambda *args, **kwargs: None  # 0.30 asks for it
    module._COMPUTE_SWA_INDICES_AND_LENS_KERNEL = leave_empty
