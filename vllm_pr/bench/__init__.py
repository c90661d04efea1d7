# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: hit rate, cost, time to first token and scale."""
