# SPDX-License-Identifier: Apache-2.0
"""Upstream's own tests on stock and on changed: what passes on one side only.

The tests come from a release's source distribution and run under ``build/``; nothing of
them is kept here.
"""
