# SPDX-License-Identifier: Apache-2.0
"""Places in Markdown, found by heading and kind of block, and the edits made there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from markdown_it import MarkdownIt
from markdown_it.token import Token

from vllm_pr.patching.edits import (
    Edit,
    NoPlace,
    edit_lines,
    newline_of,
    template,
    whole_lines,
)
from vllm_pr.patching.rules import Block, TextRule

_KINDS = {
    "paragraph_open": "paragraph",
    "bullet_list_open": "list",
    "ordered_list_open": "list",
    "list_item_open": "item",
    "fence": "code",
    "code_block": "code",
    "table_open": "table",
    "blockquote_open": "quote",
    "html_block": "html",
}


@dataclass(frozen=True)
class Section:
    """Line numbers: heading, own body (to the next heading), all with subsections."""

    heading: int
    body: int
    own_end: int
    end: int


class Document:
    """A Markdown text with its block tokens."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = MarkdownIt("commonmark").enable("table").parse(text)
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def section(self, heading: str) -> Section:
        """The section with a heading given as ``## Title``."""
        headings = self._headings()
        level, title = (
            len(heading) - len(heading.lstrip("#")),
            heading.lstrip("#").strip(),
        )
        found = [
            index
            for index, (token, text) in enumerate(headings)
            if int(token.tag[1]) == level and text == title
        ]
        if len(found) != 1:
            raise NoPlace(f"there are {len(found)} sections {heading!r}")
        token = headings[found[0]][0]
        after = [other for other, _ in headings[found[0] + 1 :]]
        last = len(self.starts) - 1
        own = after[0].map[0] if after else last
        end = next((o.map[0] for o in after if int(o.tag[1]) <= level), last)
        return Section(token.map[0], token.map[1], own, end)

    def block(self, section: Section, wanted: Block) -> tuple[int, int]:
        """First line and line after the last of the only such block in a section."""
        found = [
            span
            for kind, span in self._blocks(section)
            if kind == wanted.kind
            and (
                wanted.regex is None
                or re.search(wanted.regex, self.source(*span), re.MULTILINE)
            )
        ]
        if wanted.nth is not None:
            found = found[wanted.nth - 1 : wanted.nth]
        if len(found) != 1:
            raise NoPlace(f"'block' matches {len(found)} places, must be exactly one")
        return found[0]

    def scope(self, rule: TextRule) -> str:
        """The text in which the result of a rule is."""
        if rule.block is None and rule.action in ("before", "after"):
            return self.text
        section = self.section(rule.section)
        return self.source(section.heading, section.end)

    def source(self, first: int, last: int) -> str:
        return self.text[self.starts[first] : self.starts[last]]

    def trimmed(self, first: int, last: int) -> tuple[int, int]:
        """The span without blank lines at its end."""
        while last > first and not self.source(last - 1, last).strip():
            last -= 1
        return first, last

    def _headings(self) -> list[tuple[Token, str]]:
        return [
            (token, self.tokens[index + 1].content.strip())
            for index, token in enumerate(self.tokens)
            if token.type == "heading_open" and token.level == 0
        ]

    def _blocks(self, section: Section) -> list[tuple[str, tuple[int, int]]]:
        found = []
        for index, token in enumerate(self.tokens):
            kind = _KINDS.get(token.type)
            depth = 1 if kind == "item" else 0
            if kind is None or token.level != depth:
                continue
            if section.body <= token.map[0] < section.own_end:
                if kind == "paragraph" and _is_image(self.tokens[index + 1]):
                    kind = "image"
                found.append((kind, self.trimmed(*token.map)))
        return found


def _is_image(inline: Token) -> bool:
    children = inline.children or []
    return [child.type for child in children] == ["image"]


def edit(document: Document, rule: TextRule) -> Edit:
    """The edit that a rule makes.

    Raises:
        NoPlace: The rule has no place, or more than one.
    """
    section = document.section(rule.section)
    new = template(rule.text).strip("\n")
    if rule.block is None:
        return _edit_section(document, section, rule.action, new, rule.id)
    first, last = document.block(section, rule.block)
    starts = document.starts
    if rule.lines is not None:
        span = whole_lines(document.text, starts[first], starts[last], rule.lines)
        return edit_lines(document.text, span, rule.action, new, rule.id)
    if rule.block.kind == "item":
        span = starts[first], starts[last]
        return edit_lines(document.text, span, rule.action, new, rule.id)
    return _put(document, first, last, rule.action, new, rule.id)


def _edit_section(
    document: Document, section: Section, action: str, new: str, rule: str
) -> Edit:
    if action == "before":
        return _put(document, section.heading, section.heading, "before", new, rule)
    if action == "after":
        span = document.trimmed(section.heading, section.end)
        return _put(document, *span, "after", new, rule)
    if action == "prepend":
        return _put(document, section.heading, section.body, "after", new, rule)
    first, last = document.trimmed(section.heading, section.own_end)
    if action == "append":
        return _put(document, first, last, "after", new, rule)
    if last <= section.body:
        return _put(document, section.heading, section.body, "after", new, rule)
    first = section.body
    while not document.source(first, first + 1).strip():
        first += 1
    return _put(document, first, last, "replace", new, rule)


def _put(
    document: Document, first: int, last: int, action: str, new: str, rule: str
) -> Edit:
    """Blocks are parted by one blank line."""
    text, newline = document.text, newline_of(document.text)
    start, end = document.starts[first], document.starts[last]
    new = new.replace("\n", newline)
    if action == "replace":
        return Edit(start, end, new + newline if new else "", rule)
    if action == "before":
        return Edit(start, start, new + 2 * newline, rule)
    lead = newline if text[end - 1 : end] == "\n" else 2 * newline
    return Edit(end, end, f"{lead}{new}{newline}", rule)
