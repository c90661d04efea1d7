# SPDX-License-Identifier: Apache-2.0
"""The driver half of the backend: the CPU as the one active device."""

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):
    """Names the CPU as the current device; launches nothing."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise RuntimeError("no kernel can be launched here: set TRITON_INTERPRET=1")

    def get_benchmarker(self):
        from triton.testing import do_bench

        return do_bench
