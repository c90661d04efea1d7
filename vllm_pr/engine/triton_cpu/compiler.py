# SPDX-License-Identifier: Apache-2.0
"""The compiler half of the backend: refuses to compile."""

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpretedBackend(BaseBackend):
    """Stands for the CPU; kernels run in Triton's interpreter."""

    binary_ext = "none"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def _refuse(self, *args, **kwargs):
        raise RuntimeError("no kernel can be compiled here: set TRITON_INTERPRET=1")

    hash = parse_options = add_stages = load_dialects = _refuse
    get_module_map = _refuse
