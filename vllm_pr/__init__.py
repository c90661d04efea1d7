# SPDX-License-Identifier: Apache-2.0
"""Harness of the prefix-cache change: apply, export, prove, measure, diagnose."""
