# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin, loaded in every engine process that has ``sites/tiny_models`` on PYTHONPATH.

Registers the load format ``seeded``: random weights whose output depends on the whole
prompt. Each tensor is drawn from a generator seeded with its own name, so two releases
that name their parameters alike get the same weights.
"""

import zlib

SEED = 20
LOGIT_SPREAD = 4.0
SPECIAL_TOKENS = 8


def _standard_deviation(name: str, shape) -> float:
    """Keep the residual stream near unit variance; spread the logits."""
    fan_in = shape[-1]
    if "embed" in name:
        return fan_in**-0.5
    if "lm_head" in name:
        return LOGIT_SPREAD * fan_in**-0.5
    return fan_in**-0.5


def _fill(module, name: str, tensor) -> None:
    """Draw one parameter of ``module`` in place."""
    import torch

    kind = type(module).__name__
    if "RMSNorm" in kind:
        neutral = 0.0 if kind.startswith("Gemma") else 1.0
        sharper = 0.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 0.0
        tensor.fill_(neutral + sharper)
        return
    if not tensor.is_floating_point():
        return
    generator = torch.Generator().manual_seed(SEED ^ zlib.crc32(name.encode()))
    drawn = torch.randn(tensor.shape, generator=generator)
    tensor.copy_(drawn * _standard_deviation(name, tensor.shape))
    if "lm_head" in name:
        tensor[:SPECIAL_TOKENS].zero_()


def fill_model(model) -> None:
    """Draw every parameter of ``model``."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            _fill(module, f"{prefix}.{name}", parameter.data)


def register() -> None:
    """Entry point ``vllm.general_plugins``; may run more than once in a process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class SeededModelLoader(BaseModelLoader):
        """Load format ``seeded``."""

        def download_model(self, model_config) -> None:
            """Nothing to fetch."""

        def load_weights(self, model, model_config) -> None:
            fill_model(model)

    register_model_loader("seeded")(SeededModelLoader)
