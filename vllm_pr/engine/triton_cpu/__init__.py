# SPDX-License-Identifier: Apache-2.0
"""A Triton backend in name only, found through the entry point ``triton.backends``.

PyPI's Triton has no CPU backend, and vLLM leaves Triton out on a CPU without one. With
``TRITON_INTERPRET=1`` no kernel is ever compiled: the interpreter runs them.
"""
