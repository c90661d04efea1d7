# SPDX-License-Identifier: Apache-2.0
"""Edits of a text, all found in the original and then made at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from textwrap import dedent


class NoPlace(Exception):
    """A rule does not have exactly one place; the text says what was found."""


@dataclass(frozen=True)
class Edit:
    """Replace ``text[start:end]`` (characters) by ``new``."""

    start: int
    end: int
    new: str
    rule: str


def make_edits(text: str, edits: list[Edit]) -> str:
    """The text with all edits made; edits at one point keep their order.

    Raises:
        NoPlace: Two edits overlap.
    """
    ordered = sorted(edits, key=lambda edit: (edit.start, edit.end))
    parts, position, previous = [], 0, None
    for edit in ordered:
        if edit.start < position:
            raise NoPlace(f"changes what rule {previous!r} changes: {edit.rule!r}")
        parts += [text[position : edit.start], edit.new]
        position, previous = edit.end, edit.rule
    return "".join([*parts, text[position:]])


def newline_of(text: str) -> str:
    """The line end that the text uses."""
    return "\r\n" if "\r\n" in text else "\n"


def template(text: str) -> str:
    """A rule's text without common indentation and without its last line end."""
    return dedent(text).removesuffix("\n")


def indented(text: str, indent: str, newline: str, first: bool = True) -> str:
    """Indent all lines with content (the first only if asked to)."""
    lines = [
        indent + line if line and (first or index) else line
        for index, line in enumerate(text.split("\n"))
    ]
    return newline.join(lines)


def line_start(text: str, position: int) -> int:
    return text.rfind("\n", 0, position) + 1


def line_end(text: str, position: int) -> int:
    """Start of the next line, or the end of the text."""
    found = text.find("\n", position)
    return len(text) if found < 0 else found + 1


def indent_at(text: str, position: int) -> str:
    start = line_start(text, position)
    return text[start : start + len(text[start:]) - len(text[start:].lstrip(" \t"))]


def whole_lines(text: str, start: int, end: int, regex: str) -> tuple[int, int]:
    """The lines between two positions that the only match of ``regex`` touches."""
    first = line_start(text, start)
    found = list(re.finditer(regex, text[first:end], re.MULTILINE))
    if len(found) != 1:
        raise NoPlace(f"'lines' matches {len(found)} places")
    last = max(found[0].end() - 1, found[0].start())
    return line_start(text, first + found[0].start()), line_end(text, first + last)


def edit_lines(
    text: str, span: tuple[int, int], action: str, new: str, rule: str
) -> Edit:
    """Replace whole lines, or put new ones before or after them."""
    start, end = span
    newline = newline_of(text)
    body = indented(new, indent_at(text, start), newline) + newline if new else ""
    if action == "replace":
        return Edit(start, end, body, rule)
    if action == "before":
        return Edit(start, start, body, rule)
    if end and text[end - 1] != "\n":  # last line of a file without a line end
        body = newline + body.removesuffix(newline)
    return Edit(end, end, body, rule)
