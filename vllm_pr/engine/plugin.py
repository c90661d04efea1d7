# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin of every engine process with ``sites/tiny_models`` on its PYTHONPATH.

Registers the load format ``seeded``: random weights whose output depends on the whole
prompt. Each tensor is drawn from a generator seeded with its own name, so two releases
that name their parameters alike get the same weights.
"""

import zlib

SEED = 20
LOGIT_SPREAD = 4.0
SPECIAL_TOKENS = 8
# Which experts a token goes to must not turn on rounding, so the biases decide.
ROUTING_BIAS = 100.0
# Norms of what attention compares: a weight above 1 makes it choose instead of average,
# so that one early token still counts after thousands.
SHARP = ("q_norm.weight", "k_norm.weight", "kv_norm.weight", "compressor.norm.weight")
NORM = {"GemmaRMSNorm": (0.0, 1.0)}  # its weight is added to 1
OTHER_NORM = (1.0, 2.0)


def _fill(module, name: str, tensor) -> None:
    """Draw one parameter of ``module`` in place."""
    import torch

    kind = type(module).__name__
    if "RMSNorm" in kind:
        plain, sharp = NORM.get(kind, OTHER_NORM)
        tensor.fill_(sharp if name.endswith(SHARP) else plain)
        return
    generator = torch.Generator().manual_seed(SEED ^ zlib.crc32(name.encode()))
    tensor.copy_(torch.randn(tensor.shape, generator=generator))
    if name.endswith("e_score_correction_bias"):
        tensor.mul_(ROUTING_BIAS)
    elif "embed_tokens" not in name:
        tensor.mul_(tensor.shape[-1] ** -0.5)
    if "lm_head" in name:
        tensor.mul_(LOGIT_SPREAD)
        tensor[:SPECIAL_TOKENS].zero_()


def fill_model(model) -> None:
    """Draw every parameter of ``model``, the residual stream near unit variance."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            _fill(module, f"{prefix}.{name}", parameter.data)
    scaled = getattr(model.model, "normalizer", None)  # Gemma multiplies embeddings
    if scaled is not None:
        model.model.embed_tokens.weight.data.div_(scaled)


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
