# SPDX-License-Identifier: Apache-2.0
"""The one exception that a user of the semantic patch is meant to see."""


class PatchError(Exception):
    """What was wrong, where, and what to do: one line each, nothing was changed."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
