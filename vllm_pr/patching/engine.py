# SPDX-License-Identifier: Apache-2.0
"""Rules to text: what a file becomes, and whether a file has been through it."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from vllm_pr.patching import code
from vllm_pr.patching.edits import Edit, NoPlace, make_edits, template
from vllm_pr.patching.errors import PatchError
from vllm_pr.patching.rules import METAVARIABLE, CodeRule, FileRules, Rule, TextRule


def rewrite(
    content: bytes, edits: FileRules, rules: Sequence[Rule], release: str
) -> bytes:
    """The content of a file after its rules; all other bytes stay.

    Raises:
        PatchError: A line for each rule without exactly one place.
    """
    text = _decode(content, edits)
    made, lines = [], []
    place = _parse(edits, text)
    for rule in rules:
        try:
            made.append(_edit(text, place, rule))
        except NoPlace as error:
            lines.append(f"{_where(edits, rule, release)}: {error}")
    if lines:
        raise PatchError(*lines)
    try:
        result = make_edits(text, made)
        if edits.edits.endswith(".py"):
            ast.parse(result)
    except NoPlace as error:
        raise PatchError(f"{edits.source}: vLLM {release}: a rule {error}") from None
    except SyntaxError as error:
        _check_syntax(text, edits)
        raise PatchError(
            f"{edits.source}: the rules leave {edits.edits} of vLLM {release} with a "
            f"syntax error in line {error.lineno}: {error.msg}"
        ) from None
    return result.encode("utf-8")


def _check_syntax(text: str, edits: FileRules) -> None:
    """The rules are not to blame for what was there before."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise PatchError(
            f"{edits.edits} has a syntax error in line {error.lineno}: {error.msg}"
        ) from None


def marks(content: bytes, edits: FileRules, rules: Sequence[Rule]) -> set[str]:
    """Ids of the rules whose result is in a file, inside the rule's scope.

    White space does not count, and a metavariable stands for anything.
    """
    text = _decode(content, edits)
    place = _parse(edits, text)
    return {rule.id for rule in rules if _is_marked(text, place, rule)}


def _is_marked(text: str, place: object, rule: Rule) -> bool:
    try:
        if isinstance(rule, TextRule):
            scope = place.scope(rule)
        else:
            scope = code.find_scope(place, rule.in_).text()
    except NoPlace:
        return False
    new = template(rule.text).strip()
    if new:
        return re.search(_mark(new), scope) is not None
    try:
        _edit(text, place, rule)
    except NoPlace:
        return True
    return False


def _mark(new: str) -> str:
    """A regular expression for a template: words parted by any white space."""
    literals = METAVARIABLE.split(new)[::3]
    words = [r"\s+".join(re.escape(word) for word in part.split()) for part in literals]
    pattern = r"\s*[\s\S]*?\s*".join(words)
    head = r"(?<!\w)" if re.match(r"\w", new) else ""
    return head + pattern + (r"(?!\w)" if re.search(r"\w$", new) else "")


def _parse(edits: FileRules, text: str) -> object:
    if edits.edits.endswith(".md"):
        from vllm_pr.patching.prose import Document

        return Document(text)
    return code.parse(text)


def _edit(text: str, place: object, rule: Rule) -> Edit:
    if isinstance(rule, TextRule):
        from vllm_pr.patching import prose

        return prose.edit(place, rule)
    return code.edit(text, place, rule)


def _decode(content: bytes, edits: FileRules) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise PatchError(
            f"{edits.edits}: not UTF-8: {edits.source} edits text"
        ) from None


def _where(edits: FileRules, rule: Rule, release: str) -> str:
    scope = rule.section if isinstance(rule, TextRule) else rule.in_
    inside = f" ({scope})" if scope else ""
    return (
        f"{edits.source}: rule {rule.id!r} on {edits.edits}{inside} of vLLM {release}"
    )


__all__ = ["CodeRule", "marks", "rewrite"]
