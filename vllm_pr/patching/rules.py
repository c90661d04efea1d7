# SPDX-License-Identifier: Apache-2.0
"""Rules files: their keys, and what is wrong with one in a line each.

``vllm/a/b.rules.yaml`` edits ``vllm/a/b.py``, ``docs/a.rules.yaml`` edits
``docs/a.md``. Top-level keys: ``edits``, ``rules`` and, where not all releases have
the file, ``releases``. Keys of every rule:

* ``id`` (unique in the project) and ``why`` (one line);
* ``releases``: a version specifier set, ``all`` by default;
* ``part``: ``queue`` (default) or ``default``, the commit it belongs to;
* one action, a text: ``replace`` (an empty text takes the lines away), ``before``,
  ``after``, ``prepend`` and ``append`` (inside a body), ``add_item``.

Python. ``match`` is an ast-grep pattern, ``rule`` a whole ast-grep rule; one of them,
inside ``in`` (class, class.method or function; without it anywhere in the file), must
match exactly one node. The text is indented as its place, and ``$NAME`` or
``$$$NAMES`` in it stands for what the pattern matched.

* ``before`` and ``after`` go beside the enclosing statement, on lines of their own; a
  function or class is parted from its neighbours by blank lines.
* ``prepend`` (after a docstring) and ``append`` go into the body of the match or, with
  neither ``match`` nor ``rule``, of ``in``; ``append`` also adds lines to a string.
* ``add_item`` adds to the arguments, parameters, bases or elements of the match, in
  the layout that the list has; to an import, where isort wants it.
* ``lines`` is a regular expression that must match once in the match or, without one,
  in the docstring of ``in``: the action is then on the whole lines that it touches.

Markdown. ``section`` is a heading such as ``## Title``.

* Alone: ``replace``, ``prepend`` and ``append`` are on its own text, which ends at the
  next heading; ``before`` and ``after`` put blocks around it with its subsections.
* With ``block`` (``kind``, and ``nth`` or ``regex``, to choose one of the section's own
  blocks): ``replace``, ``before`` and ``after`` are on that block, or on its ``lines``.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from vllm_pr.patching.errors import PatchError

SUFFIX = ".rules.yaml"
PARTS = ("queue", "default")
Part = Literal["queue", "default"]
ACTIONS = ("replace", "before", "after", "prepend", "append", "add_item")
METAVARIABLE = re.compile(r"\$\$\$([A-Z_][A-Z0-9_]*)|\$([A-Z_][A-Z0-9_]*)")


def _check_releases(text: str) -> str:
    if text != "all":
        try:
            SpecifierSet(text)
        except InvalidSpecifier:
            raise ValueError(
                f"{text!r} is no version specifier (such as '>=0.24,<0.29', or 'all')"
            ) from None
    return text


def _check_regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    return text


Releases = Annotated[str, AfterValidator(_check_releases)]
Regex = Annotated[str, AfterValidator(_check_regex)]


def fits(releases: str, release: str) -> bool:
    """Whether a ``releases:`` value (specifier set or ``all``) covers ``release``."""
    if releases == "all":
        return True
    return SpecifierSet(releases).contains(Version(release), prereleases=True)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Rule(_Model):
    """What every rule has: a name, where it counts, and exactly one action."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    why: str = Field(min_length=1)
    releases: Releases = "all"
    part: Part = "queue"
    lines: Regex | None = None
    replace: str | None = None
    before: str | None = None
    after: str | None = None
    prepend: str | None = None
    append: str | None = None
    add_item: str | None = None

    @property
    def action(self) -> str:
        return next(name for name in ACTIONS if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """The template of the action."""
        return getattr(self, self.action)

    @model_validator(mode="after")
    def _one_action(self) -> Rule:
        given = [name for name in ACTIONS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"needs exactly one of {', '.join(ACTIONS)}; "
                f"has {' and '.join(given) or 'none'}"
            )
        if self.lines is not None and given[0] not in ("replace", "before", "after"):
            raise ValueError(f"'lines' does not go with '{given[0]}'")
        return self


class CodeRule(Rule):
    """An edit of a Python file: an ast-grep match inside a class or function."""

    in_: str | None = Field(None, alias="in", pattern=r"^\w+(\.\w+)*$")
    match: str | None = None
    rule: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _place(self) -> CodeRule:
        if self.match is not None and self.rule is not None:
            raise ValueError("has both 'match' and 'rule'")
        anchored = self.match is not None or self.rule is not None
        if self.lines is not None:
            if not anchored and self.in_ is None:
                raise ValueError("'lines' needs 'match', 'rule' or 'in'")
        elif not anchored and self.action in ("replace", "before", "after"):
            raise ValueError(f"'{self.action}' needs 'match' or 'rule'")
        elif not anchored and self.action == "add_item" and self.in_ is None:
            raise ValueError("'add_item' needs 'match', 'rule' or 'in'")
        known = {"".join(pair) for pair in METAVARIABLE.findall(self._source())}
        for pair in METAVARIABLE.findall(self.text):
            if "".join(pair) not in known:
                raise ValueError(
                    f"'{self.action}' uses ${''.join(pair)}: never matched"
                )
        return self

    def _source(self) -> str:
        return self.match if self.match is not None else yaml.safe_dump(self.rule or {})


class Block(_Model):
    """One block of a Markdown section."""

    kind: Literal[
        "paragraph", "list", "item", "code", "table", "quote", "html", "image"
    ]
    nth: int | None = Field(None, ge=1)
    regex: Regex | None = None


class TextRule(Rule):
    """An edit of a Markdown file: a section by its heading, or a block in it."""

    section: str = Field(pattern=r"^#{1,6} \S")
    block: Block | None = None

    @model_validator(mode="after")
    def _place(self) -> TextRule:
        if self.action == "add_item":
            raise ValueError("'add_item' is for Python files")
        if self.block is not None and self.action in ("prepend", "append"):
            raise ValueError(f"'{self.action}' goes with a section, not with 'block'")
        if self.lines is not None and self.block is None:
            raise ValueError("'lines' needs 'block'")
        return self


class RulesFile(_Model):
    """One rules file: the path it edits and its rules."""

    edits: str
    releases: Releases = "all"
    rules: list[Any]


class FileRules:
    """The validated rules for one upstream path.

    Attributes:
        source: Path of the rules file, relative to the root of the sources.
        edits: Upstream path, POSIX, relative to the root of a tree.
    """

    def __init__(
        self, source: str, edits: str, releases: str, rules: list[Rule]
    ) -> None:
        self.source, self.edits, self.releases = source, edits, releases
        self.rules = rules

    def select(self, release: str, parts: tuple[str, ...] = PARTS) -> list[Rule]:
        """The rules for a release that belong to any of ``parts``."""
        if not fits(self.releases, release):
            return []
        return [
            rule
            for rule in self.rules
            if rule.part in parts and fits(rule.releases, release)
        ]


def load_rules(root: Path, path: Path) -> FileRules:
    """Read and validate one rules file.

    Raises:
        PatchError: One line for each thing that is wrong with it.
    """
    source = path.relative_to(root).as_posix()
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PatchError(f"{source}: not readable as YAML: {_flat(error)}") from None
    if not isinstance(data, dict):
        raise PatchError(f"{source}: needs the keys 'edits' and 'rules'")
    try:
        header = RulesFile.model_validate(data)
    except ValidationError as error:
        raise PatchError(*_explain(source, RulesFile, error)) from None
    _check_edits(source, header.edits)
    model = TextRule if header.edits.endswith(".md") else CodeRule
    rules, lines = [], []
    for index, item in enumerate(header.rules, 1):
        name = item.get("id") if isinstance(item, dict) else None
        where = f"{source}: rule {name!r}" if name else f"{source}: rule no. {index}"
        try:
            rules.append(model.model_validate(item))
        except ValidationError as error:
            lines += _explain(where, model, error)
    if lines:
        raise PatchError(*lines)
    return FileRules(source, header.edits, header.releases, rules)


def _check_edits(source: str, edits: str) -> None:
    beside = PurePosixPath(source.removesuffix(SUFFIX))
    if PurePosixPath(edits).with_suffix("") != beside or not edits.endswith(
        (".py", ".md")
    ):
        raise PatchError(
            f"{source}: edits {edits!r}, but a rules file lies beside the .py or .md "
            f"file that it edits: expected {beside}.py or {beside}.md"
        )


def _explain(where: str, model: type[BaseModel], error: ValidationError) -> list[str]:
    return [f"{where}: {_sentence(model, item)}" for item in error.errors()]


def _sentence(model: type[BaseModel], item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        if "." in key:
            return f"unknown key {key!r}"
        known = [field.alias or name for name, field in model.model_fields.items()]
        return f"unknown key {key!r} (known: {', '.join(known)})"
    if item["type"] == "missing":
        return f"key {key!r} is missing"
    text = item["msg"].removeprefix("Value error, ")
    return f"key {key!r}: {text}" if key else text


def _flat(error: Exception) -> str:
    return " ".join(str(error).split())
