# SPDX-License-Identifier: Apache-2.0
"""Tiny models on the real engine: in a process of its own, or behind ``vllm serve``."""
