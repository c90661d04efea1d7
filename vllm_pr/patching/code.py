# SPDX-License-Identifier: Apache-2.0
"""Places in Python code, found by ast-grep, and the edits made there."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from ast_grep_py import SgNode, SgRoot

from vllm_pr.patching.edits import (
    Edit,
    NoPlace,
    edit_lines,
    indent_at,
    indented,
    line_end,
    line_start,
    newline_of,
    template,
    whole_lines,
)
from vllm_pr.patching.rules import METAVARIABLE, CodeRule

_DEFINITIONS = ("class_definition", "function_definition")
_LINE_LENGTH = 88


def parse(text: str) -> SgNode:
    return SgRoot(text, "python").root()


def edit(text: str, root: SgNode, rule: CodeRule) -> Edit:
    """The edit that a rule makes.

    Raises:
        NoPlace: The rule has no place, or more than one, or an unfit one.
    """
    scope = find_scope(root, rule.in_)
    anchored = rule.match is not None or rule.rule is not None
    node = find_one(scope, rule) if anchored else scope
    new = fill(text, template(rule.text), node) if anchored else template(rule.text)
    if rule.lines is not None:
        place = node if anchored else _docstring(scope)
        span = whole_lines(text, _start(place), _end(place), rule.lines)
        return edit_lines(text, span, rule.action, new, rule.id)
    if rule.action in ("before", "after"):
        statement = _statement(node)
        if rule.in_ is not None and _start(statement) <= _start(scope):
            raise NoPlace(f"'{rule.action}' leads out of {rule.in_}")
        return _beside(text, statement, rule.action, new, rule.id)
    if rule.action in ("prepend", "append"):
        return _inside(text, node, rule.action, new, rule.id)
    if rule.action == "add_item":
        return _add_item(text, node, new, rule.id)
    return _replace(text, node, new, rule.id)


def find_scope(root: SgNode, name: str | None) -> SgNode:
    """The class or function with a dotted name, with its decorators."""
    if name is None:
        return root
    last = re.escape(name.rsplit(".", 1)[-1])
    named = {"has": {"field": "name", "regex": f"^{last}$"}}
    found = [
        node
        for node in root.find_all(
            {"rule": {"any": [{"kind": kind, **named} for kind in _DEFINITIONS]}}
        )
        if _qualified_name(node) == name
    ]
    if len(found) != 1:
        raise NoPlace(f"there are {len(found)} definitions of {name}")
    return _decorated(found[0])


def find_one(scope: SgNode, rule: CodeRule) -> SgNode:
    config = {"pattern": rule.match} if rule.rule is None else rule.rule
    found = find_all(scope, config)
    if len(found) != 1:
        raise NoPlace(f"matches {len(found)} places, must be exactly one")
    return found[0]


def find_all(scope: SgNode, rule: dict[str, Any]) -> list[SgNode]:
    try:
        return scope.find_all({"rule": rule})
    except Exception as error:
        reason = " ".join(str(error).split("Stack backtrace")[0].split())
        raise NoPlace(f"ast-grep: {reason}") from None


def fill(text: str, new: str, node: SgNode) -> str:
    """Put the matched source in the place of each metavariable.

    Further lines of the source move with the line that they are put on.
    """
    lines = []
    for line in new.split("\n"):
        indent = line[: len(line) - len(line.lstrip(" "))]
        captured = partial(_captured, text, node, indent)
        lines.append(METAVARIABLE.sub(captured, line))
    return "\n".join(lines)


def _captured(text: str, node: SgNode, indent: str, found: re.Match[str]) -> str:
    many, one = found.groups()
    nodes = node.get_multiple_matches(many) if many else [node.get_match(one)]
    if not nodes:
        return ""
    if nodes[0] is None:
        raise NoPlace(f"${one} matched nothing")
    start, end = _start(nodes[0]), _end(nodes[-1])
    first, *rest = text[start:end].replace("\r\n", "\n").split("\n")
    old = indent_at(text, start)
    return "\n".join([first, *(indent + line.removeprefix(old) for line in rest)])


def _replace(text: str, node: SgNode, new: str, rule: str) -> Edit:
    start, end = _start(node), _end(node)
    if not new:
        return edit_lines(text, _own_lines(text, start, end), "replace", "", rule)
    base = indent_at(text, start)
    return Edit(start, end, indented(new, base, newline_of(text), first=False), rule)


def _beside(text: str, node: SgNode, action: str, new: str, rule: str) -> Edit:
    span = _own_lines(text, _start(node), _end(node))
    if re.match(r"\s*(@|class\b|def\b|async def\b)", new):
        gap = "\n" * (1 if indent_at(text, span[0]) else 2)
        new = new.strip("\n")
        new = new + gap if action == "before" else gap + new
    return edit_lines(text, span, action, new, rule)


def _inside(text: str, node: SgNode, action: str, new: str, rule: str) -> Edit:
    if node.kind() in ("string", "string_content"):
        return _in_string(text, node, action, new, rule)
    body = node if node.kind() == "module" else _definition(node).field("body")
    statements = [] if body is None else body.named_children()
    if not statements:
        raise NoPlace(f"has no body to {action} to")
    if action == "append":
        return _beside(text, statements[-1], "after", new, rule)
    if _is_docstring(statements[0]):
        return _beside(text, statements[0], "after", new, rule)
    return _beside(text, statements[0], "before", new, rule)


def _in_string(text: str, node: SgNode, action: str, new: str, rule: str) -> Edit:
    """More lines at the end of a string, before quotes on a line of their own."""
    if node.kind() == "string":
        node = next(n for n in node.children() if n.kind() == "string_content")
    if action == "prepend":
        raise NoPlace("cannot prepend to a string")
    newline = newline_of(text)
    new = newline + indented(new, indent_at(text, _end(node)), newline)
    content = text[_start(node) : _end(node)]
    end = _start(node) + len(content.rstrip())
    return Edit(end, end, new, rule)


def _add_item(text: str, node: SgNode, new: str, rule: str) -> Edit:
    holder = _holder(node)
    is_import = holder.kind() == "import_from_statement"
    items = [item for item in _items(holder) if item.kind() != "comment"]
    if not items:
        position = _end(holder) - 1
        return Edit(position, position, new, rule)
    if is_import:
        later = [item for item in items if _isort_key(item.text()) > _isort_key(new)]
        if _overlong(text, holder, new):
            names = sorted([*(item.text() for item in items), new], key=_isort_key)
            lines = "".join(f"    {name},\n" for name in names)
            source = holder.field("module_name").text()
            return _replace(text, node, f"from {source} import (\n{lines})", rule)
        if later:
            start = _start(later[0])
            gap = text[line_start(text, start) : start].strip()
            joint = " " if gap else newline_of(text) + indent_at(text, start)
            return Edit(start, start, f"{new},{joint}", rule)
    return _after_last_item(text, holder, items, new, rule)


def _after_last_item(
    text: str, holder: SgNode, items: list[SgNode], new: str, rule: str
) -> Edit:
    last = _end(items[-1])
    comma = re.match(r"\s*,", text[last : _end(holder)])
    after = last + comma.end() if comma else last
    one_a_line = len({item.range().start.line for item in items}) == len(items)
    closing = holder.range().end.line
    if closing == items[-1].range().end.line or (len(items) > 1 and not one_a_line):
        return Edit(last, last, f", {new}", rule)
    newline = newline_of(text)
    new = indented(new, indent_at(text, last), newline)
    end = line_end(text, after) - len(newline)
    if comma:
        return Edit(end, end, f"{newline}{new},", rule)
    return Edit(last, end, f",{text[last:end]}{newline}{new},", rule)


def _holder(node: SgNode) -> SgNode:
    node = _definition(node)
    fields = {
        "call": "arguments",
        "function_definition": "parameters",
        "class_definition": "superclasses",
    }
    if node.kind() in fields:
        found = node.field(fields[node.kind()])
        if found is None:
            raise NoPlace(f"has no {fields[node.kind()]} to add an item to")
        return found
    if node.kind() == "expression_statement" and node.named_children():
        return _holder(node.named_children()[0])
    if node.kind() == "import_from_statement" or node.text()[-1:] in ")]}":
        return node
    raise NoPlace(
        f"'add_item' needs a call, definition, import or list, has {node.kind()}"
    )


def _items(holder: SgNode) -> list[SgNode]:
    if holder.kind() == "import_from_statement":
        return holder.field_children("name")
    return holder.named_children()


def _isort_key(name: str) -> tuple[int, str, str]:
    constant = len(name) > 1 and name.isupper()
    order = 0 if constant else 1 if name[:1].isupper() else 2
    return order, name.lower(), name


def _overlong(text: str, node: SgNode, new: str) -> bool:
    source = node.text()
    return "\n" not in source and len(source) + len(new) + 2 > _LINE_LENGTH


def _docstring(scope: SgNode) -> SgNode:
    body = _definition(scope).field("body")
    statements = [] if body is None else body.named_children()
    if not statements or not _is_docstring(statements[0]):
        raise NoPlace("has no docstring for 'lines'")
    return statements[0]


def _is_docstring(node: SgNode) -> bool:
    children = node.named_children()
    return (
        node.kind() == "expression_statement"
        and len(children) == 1
        and children[0].kind() == "string"
    )


def _statement(node: SgNode) -> SgNode:
    """The statement around a node; a comment stands for itself."""
    while node.kind() != "comment":
        parent = node.parent()
        if parent is None or parent.kind() in ("module", "block"):
            return node
        node = parent
    return node


def _own_lines(text: str, start: int, end: int) -> tuple[int, int]:
    """The lines of a statement, which must have them for itself."""
    first, last = line_start(text, start), line_end(text, end)
    rest = text[end:last].strip()
    if text[first:start].strip() or (rest and not rest.startswith("#")):
        raise NoPlace("its statement shares a line with others")
    return first, last


def _definition(node: SgNode) -> SgNode:
    if node.kind() == "decorated_definition":
        return node.field("definition") or node
    return node


def _decorated(node: SgNode) -> SgNode:
    parent = node.parent()
    if parent is not None and parent.kind() == "decorated_definition":
        return parent
    return node


def _qualified_name(node: SgNode) -> str:
    nodes = [node, *node.ancestors()]
    names = [one.field("name") for one in nodes if one.kind() in _DEFINITIONS]
    return ".".join(name.text() for name in reversed(names) if name is not None)


def _start(node: SgNode) -> int:
    return node.range().start.index


def _end(node: SgNode) -> int:
    return node.range().end.index
