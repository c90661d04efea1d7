# SPDX-License-Identifier: Apache-2.0
"""``vllm-pr doctor``: why a running server prefills again what it has just seen.

``probes`` sends a bounded number of harmless requests and records `evidence`;
``verdicts`` turns evidence into findings and does nothing else; ``report`` prints both.
"""
