# SPDX-License-Identifier: Apache-2.0
"""The semantic patch: find places by structure, change them, take it all out again.

Sources are the new files at their upstream path and one ``*.rules.yaml`` beside the
path of each edited file. From them come ``apply``, ``status``, ``revert``, ``export``
and the *changed* copy of the installed package (``trees.changed_tree``).
"""
