# SPDX-License-Identifier: Apache-2.0
"""The rules: what is wrong with them, where they match, and what they make."""

from __future__ import annotations

import difflib
import re

import patching_kit as kit
import pytest

from vllm_pr.patching import engine
from vllm_pr.patching.errors import PatchError
from vllm_pr.patching.rules import fits
from vllm_pr.patching.sources import Sources

POOL = "vllm/v1/core/pool.py"
PAGE = "docs/design/page.md"


def rewrite(tmp_path, *items: str, text: str, edits: str = POOL) -> str:
    sources = Sources(kit.write(tmp_path, kit.rules(*items, edits=edits)))
    selected = sources.edits[0].select(kit.RELEASE)
    made = engine.rewrite(
        text.encode(), sources.edits[0], selected, kit.RELEASE
    ).decode()
    ids = {rule.id for rule in selected}
    assert engine.marks(made.encode(), sources.edits[0], selected) == ids
    assert engine.marks(text.encode(), sources.edits[0], selected) == set()
    return made


def lines_of(old: str, new: str) -> list[str]:
    """The lines removed (-) and added (+), in order."""
    found = difflib.ndiff(old.splitlines(), new.splitlines())
    return [line.replace(" ", "", 1) for line in found if line[0] in "-+"]


# --- validation


@pytest.mark.parametrize(
    "item, says",
    [
        (
            "id: a\nwhy: x\nmatch: f()\nreplace: g()\ncolour: red",
            "unknown key 'colour'",
        ),
        ("id: a\nmatch: f()\nreplace: g()", "key 'why' is missing"),
        ("why: x\nmatch: f()\nreplace: g()", "rule no. 1: key 'id' is missing"),
        ("id: A b\nwhy: x\nmatch: f()\nreplace: g()", "key 'id'"),
        ("id: a\nwhy: x\nmatch: f()", "exactly one of replace, .*; has none"),
        (
            "id: a\nwhy: x\nmatch: f()\nreplace: g()\nafter: h()",
            "has replace and after",
        ),
        ("id: a\nwhy: x\nreplace: g()", "'replace' needs 'match' or 'rule'"),
        ("id: a\nwhy: x\nmatch: f()\nrule: {kind: call}\nreplace: g()", "has both"),
        ("id: a\nwhy: x\nmatch: f($A)\nreplace: g($B)", r"uses \$B: never matched"),
        ("id: a\nwhy: x\nmatch: f()\nreplace: g()\nreleases: new", "no version spec"),
        ("id: a\nwhy: x\nmatch: f()\nreplace: g()\npart: rest", "'queue' or 'default'"),
        ("id: a\nwhy: x\nmatch: f()\nreplace: g()\nin: f()", "key 'in'"),
        (
            "id: a\nwhy: x\nmatch: f()\nreplace: g()\nlines: '('",
            "no regular expression",
        ),
        (
            "id: a\nwhy: x\nmatch: f()\nappend: g()\nlines: x",
            "does not go with 'append'",
        ),
        ("id: a\nwhy: x\nlines: x\nreplace: g()", "'lines' needs"),
        ("id: a\nwhy: x\nadd_item: b", "'add_item' needs"),
        ("id: a\nwhy: x\nmatch: 5\nreplace: g()", "key 'match'"),
    ],
)
def test_a_bad_rule_is_named(tmp_path, item, says):
    kit.write(tmp_path, kit.rules(item))
    with pytest.raises(PatchError, match=says) as error:
        Sources(tmp_path)
    assert error.value.lines[0].startswith("vllm/v1/core/pool.rules.yaml: rule ")


@pytest.mark.parametrize(
    "item, says",
    [
        ("id: a\nwhy: x\nreplace: y", "key 'section' is missing"),
        ("id: a\nwhy: x\nsection: Queue\nreplace: y", "key 'section'"),
        ("id: a\nwhy: x\nsection: '## Q'\nmatch: y\nreplace: y", "unknown key 'match'"),
        ("id: a\nwhy: x\nsection: '## Q'\nadd_item: y", "for Python files"),
        ("id: a\nwhy: x\nsection: '## Q'\nblock: {kind: p}\nreplace: y", "block.kind"),
        (
            "id: a\nwhy: x\nsection: '## Q'\nblock: {kind: list, top: 1}\nreplace: y",
            "unknown key 'block.top'",
        ),
        (
            "id: a\nwhy: x\nsection: '## Q'\nblock: {kind: list}\nappend: y",
            "goes with a section",
        ),
        (
            "id: a\nwhy: x\nsection: '## Q'\nlines: a\nreplace: y",
            "'lines' needs 'block'",
        ),
    ],
)
def test_a_bad_rule_for_markdown_is_named(tmp_path, item, says):
    kit.write(tmp_path, kit.rules(item, edits=PAGE))
    with pytest.raises(PatchError, match=says):
        Sources(tmp_path)


@pytest.mark.parametrize(
    "content, says",
    [
        ("edits: [", "not readable as YAML"),
        ("- 1", "needs the keys 'edits' and 'rules'"),
        ("edits: vllm/v1/core/pool.py", "key 'rules' is missing"),
        ("edits: vllm/v1/core/other.py\nrules: []", "lies beside"),
        ("edits: vllm/v1/core/pool.cu\nrules: []", "lies beside"),
        ("edits: vllm/v1/core/pool.py\nrules: []\nmore: 1", "unknown key 'more'"),
        ("edits: vllm/v1/core/pool.py\nrules: [5]", "rule no. 1"),
        (b"edits: \xff", "not readable as YAML"),
    ],
)
def test_a_bad_rules_file_is_named(tmp_path, content, says):
    kit.write(tmp_path, {"vllm/v1/core/pool.rules.yaml": content})
    with pytest.raises(PatchError, match=f"pool.rules.yaml: .*{says}"):
        Sources(tmp_path)


def test_all_bad_rules_are_named_at_once(tmp_path):
    kit.write(tmp_path, kit.rules("id: a", "id: b"))
    with pytest.raises(PatchError) as error:
        Sources(tmp_path)
    named = "\n".join(error.value.lines)
    assert "rule 'a'" in named and "rule 'b'" in named


def test_ids_are_unique_in_the_project(tmp_path):
    rule = "id: twice\nwhy: x\nmatch: f()\nreplace: g()"
    kit.write(tmp_path, kit.rules(rule) | kit.rules(rule, edits="vllm/other.py"))
    with pytest.raises(PatchError, match="rule 'twice' has the id of a rule in"):
        Sources(tmp_path)


@pytest.mark.parametrize(
    "files, says",
    [
        ({"vllm/stray.py": ""}, "vllm/stray.py is not listed"),
        (
            {"vllm_pr/patching/new_files.yaml": "vllm/gone.py: {part: queue}"},
            "lists vllm/gone.py, which is not there",
        ),
        (
            {"vllm_pr/patching/new_files.yaml": "vllm/a.py: {part: other}"},
            "vllm/a.py.part.*'queue' or 'default'",
        ),
        ({"vllm_pr/patching/new_files.yaml": "vllm/a.py: {"}, "new_files.yaml"),
    ],
)
def test_new_files_are_listed_and_there(tmp_path, files, says):
    kit.write(tmp_path, files)
    with pytest.raises(PatchError, match=says):
        Sources(tmp_path)


@pytest.mark.parametrize(
    "releases, release, expected",
    [
        ("all", "0.23.0", True),
        (">=0.29", "0.29.0", True),
        (">=0.29", "0.28.0", False),
        (">=0.23,<0.24", "0.23.0", True),
        (">=0.24,<0.29", "0.29.0", False),
        (">=0.29", "0.33.0", True),
    ],
)
def test_releases(releases, release, expected):
    assert fits(releases, release) is expected


def test_rules_for_other_releases_and_parts_are_skipped(tmp_path):
    rule = "why: x\nmatch: f()\nreplace: g()"
    kit.write(
        tmp_path,
        kit.rules(
            f"id: new\nreleases: '>=0.29'\n{rule}",
            f"id: old\nreleases: <0.29\npart: default\n{rule}",
            f"id: all\npart: default\n{rule}",
        ),
    )
    edits = Sources(tmp_path).edits[0]
    assert [rule.id for rule in edits.select("0.28.0")] == ["old", "all"]
    assert [rule.id for rule in edits.select("0.29.0")] == ["new", "all"]
    assert [rule.id for rule in edits.select("0.29.0", ("queue",))] == ["new"]


def test_a_whole_file_of_rules_for_some_releases(tmp_path):
    kit.write(
        tmp_path,
        {
            "vllm/a.rules.yaml": "edits: vllm/a.py\nreleases: '>=0.30'\nrules:\n"
            "  - {id: a, why: x, match: f(), replace: g()}\n"
        },
    )
    edits = Sources(tmp_path).edits[0]
    assert edits.select("0.29.0") == []
    assert [rule.id for rule in edits.select("0.30.0")] == ["a"]


# --- exactly one place


@pytest.mark.parametrize(
    "item, says",
    [
        ("match: self.queue = Queue($A, $B)\nreplace: x = 1", "matches 0 places"),
        ("match: block.count += 1\nreplace: x = 1", "matches 2 places"),
        (
            "in: Pool.touched\nmatch: block.count += 1\nreplace: x = 1",
            "0 definitions of Pool.touched",
        ),
        ("in: touch\nmatch: f()\nreplace: g()", "matches 0 places"),
        ("rule: {kind: no_such}\nreplace: x", "ast-grep: .*no_such"),
        ("rule: {patrn: x}\nreplace: x", "ast-grep: .*patrn"),
        ("in: Pool\nlines: nowhere\nafter: x", "'lines' matches 0 places"),
        ("in: touch\nlines: x\nafter: x", "has no docstring"),
        ("match: block\nafter: x", r"matches \d+ places"),
        (
            "in: touch\nmatch: 'def touch($$$): $$$B'\nafter: x",
            "'after' leads out of touch",
        ),
    ],
)
def test_a_rule_without_exactly_one_place_is_named(tmp_path, item, says):
    with pytest.raises(PatchError) as error:
        rewrite(tmp_path, f"id: the-rule\nwhy: x\n{item}", text=kit.POOL)
    (line,) = error.value.lines
    assert line.startswith("vllm/v1/core/pool.rules.yaml: rule 'the-rule' on " + POOL)
    assert f"of vLLM {kit.RELEASE}: " in line
    assert re.search(says, line)


def test_all_rules_without_a_place_are_named(tmp_path):
    bad = "why: x\nmatch: nothing()\nreplace: g()"
    with pytest.raises(PatchError) as error:
        rewrite(tmp_path, f"id: a\n{bad}", f"id: b\n{bad}", text=kit.POOL)
    assert len(error.value.lines) == 2


def test_two_definitions_of_a_name(tmp_path):
    text = "def f():\n    a()\n\n\ndef f():\n    b()\n"
    with pytest.raises(PatchError, match="2 definitions of f"):
        rewrite(tmp_path, "id: a\nwhy: x\nin: f\nmatch: a()\nreplace: c()", text=text)


def test_two_rules_on_one_place_are_named(tmp_path):
    rule = "why: x\nmatch: self.size = $X\nreplace:"
    with pytest.raises(PatchError, match="'a'.*'b'|'b'.*'a'"):
        rewrite(
            tmp_path, f"id: a\n{rule} one = 1", f"id: b\n{rule} two = 2", text=kit.POOL
        )


def test_a_result_with_a_syntax_error_is_refused(tmp_path):
    item = "id: a\nwhy: x\nmatch: self.size = $X\nreplace: self.size = (($X)"
    with pytest.raises(PatchError, match="pool.py of vLLM .* syntax error in line"):
        rewrite(tmp_path, item, text=kit.POOL)


# --- what rules make of Python


def test_replace_keeps_all_other_bytes(tmp_path):
    item = """
        id: a
        why: x
        in: Pool.__init__
        match: self.queue = Queue($BLOCKS)
        replace: self.queue = Segmented($BLOCKS, 2)
    """
    made = rewrite(tmp_path, item, text=kit.POOL)
    assert made == kit.POOL.replace("Queue(blocks) ", "Segmented(blocks, 2) ")


def test_characters_of_several_bytes(tmp_path):
    text = "# äöü 🙂\nx = f('ß')  # é\ny = 1\n"
    made = rewrite(tmp_path, "id: a\nwhy: x\nmatch: f($A)\nreplace: g($A)", text=text)
    assert made == text.replace("f(", "g(")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_before_and_after_are_indented_as_the_statement(tmp_path, newline):
    text = kit.POOL.replace("\n", newline)
    made = rewrite(
        tmp_path,
        """
        id: a
        why: x
        in: Pool.__init__
        match: Queue($BLOCKS)
        before: |
          if $BLOCKS:
              first = $BLOCKS[0]
        """,
        """
        id: b
        why: x
        in: Pool.__init__
        match: self.queue = $ANY
        after: self.late = 1
        """,
        text=text,
    )
    assert made.count("\r\n") == (made.count("\n") if newline == "\r\n" else 0)
    assert lines_of(text, made) == [
        "+        if blocks:",
        "+            first = blocks[0]",
        "+        self.late = 1",
    ]
    assert "Queue(blocks)  # a list" + newline + "        self.late" in made


def test_after_the_last_line_without_a_line_end(tmp_path):
    item = "id: a\nwhy: x\nmatch: f()\nafter: g()"
    assert rewrite(tmp_path, item, text="f()") == "f()\ng()"


def test_after_a_compound_statement(tmp_path):
    made = rewrite(
        tmp_path,
        """
        id: a
        why: x
        in: Pool.touch
        match: |
          for $B in $ALL:
              $$$BODY
        after: done($ALL)
        """,
        text=kit.POOL,
    )
    assert "            block.count += 1\n        done(blocks)\n" in made


def test_a_statement_is_wrapped_and_its_lines_move(tmp_path):
    text = "def f():\n    g(\n        1,\n    )\n"
    made = rewrite(
        tmp_path,
        """
        id: a
        why: x
        rule: {pattern: g($$$ARGS)}
        replace: |
          if c:
              h($$$ARGS)
        """,
        text=text,
    )
    assert made == "def f():\n    if c:\n        h(1,)\n"


def test_a_moved_body_keeps_its_shape(tmp_path):
    text = "def f():\n    for a in b:\n        if a:\n            c()\n    d()\n"
    made = rewrite(
        tmp_path,
        """
        id: a
        why: x
        match: |
          for $A in $B:
              $$$BODY
        replace: |
          with lock:
              for $A in $B:
                  $$$BODY
        """,
        text=text,
    )
    assert made == (
        "def f():\n    with lock:\n        for a in b:\n            if a:\n"
        "                c()\n    d()\n"
    )


def test_statements_that_share_a_line_are_refused(tmp_path):
    item = "id: a\nwhy: x\nmatch: f()\nafter: h()"
    for text in ("f(); g()\n", "if a: f()\n"):
        with pytest.raises(PatchError, match="shares a line"):
            rewrite(tmp_path, item, text=text)


def test_an_empty_replacement_takes_the_lines_away(tmp_path):
    item = "id: a\nwhy: x\nin: Pool.__init__\nmatch: self.size = $X\nreplace: ''"
    made = rewrite(tmp_path, item, text=kit.POOL)
    assert made == kit.POOL.replace("        self.size = len(blocks)\n", "")


def test_a_method_is_parted_by_blank_lines(tmp_path):
    made = rewrite(
        tmp_path,
        """
        id: a
        why: x
        in: Pool
        match: |
          def usage($$$): $$$BODY
        before: |
          def one(self):
              return 1
        """,
        """
        id: b
        why: x
        in: Pool
        append: |
          def two(self):
              return 2
        """,
        """
        id: c
        why: x
        append: |
          def three():
              return 3
        """,
        text=kit.POOL,
    )
    assert "\n\n    def one(self):\n        return 1\n\n    @property\n" in made
    assert "self.size\n\n    def two(self):\n        return 2\n\n\ndef touch" in made
    assert made.endswith("count += 1\n\n\ndef three():\n    return 3\n")


def test_prepend_comes_after_the_docstring(tmp_path):
    made = rewrite(
        tmp_path,
        "id: a\nwhy: x\nin: Pool.touch\nprepend: first()",
        "id: b\nwhy: x\nin: touch\nprepend: first()",
        text=kit.POOL,
    )
    assert '\n\n        """\n        first()\n        for' in made
    assert "def touch(blocks):\n    first()\n    for" in made


def test_a_comment_is_a_place(tmp_path):
    made = rewrite(
        tmp_path,
        """
        id: a
        why: x
        in: Pool.__init__
        rule: {kind: comment, regex: all}
        replace: "# The queue of segments."
        """,
        text=kit.POOL,
    )
    assert lines_of(kit.POOL, made) == [
        "-        # The queue of all.",
        "+        # The queue of segments.",
    ]


def test_lines_of_a_docstring(tmp_path):
    made = rewrite(
        tmp_path,
        r"""
        id: a
        why: x
        in: Pool.touch
        lines: ^( *)blocks:.*(\n\1 +.*)*
        after: |
          more: What else.
              And so on.
        """,
        text=kit.POOL,
    )
    assert lines_of(kit.POOL, made) == [
        "+            more: What else.",
        "+                And so on.",
    ]


def test_more_lines_at_the_end_of_a_string(tmp_path):
    text = 'class A:\n    a: int = 1\n    """One.\n    Two."""\n    b = 1\n'
    item = """
        id: a
        why: x
        rule:
          kind: string_content
          inside: {kind: expression_statement, stopBy: end, follows: {regex: "^a:"}}
        append: |

          Three.
    """
    made = rewrite(tmp_path, item, text=text)
    assert made == text.replace("Two.", "Two.\n\n    Three.")


IMPORT = "rule: {pattern: 'from vllm.blocks import $$$NAMES'}"


@pytest.mark.parametrize(
    "text, match, item, expected",
    [
        ("f(a)\n", "f($$$A)", "b=1", "f(a, b=1)\n"),
        ("f()\n", "f($$$A)", "b=1", "f(b=1)\n"),
        (
            "f(\n    a,\n    c,\n)\n",
            "f($$$A)",
            "b=1",
            "f(\n    a,\n    c,\n    b=1,\n)\n",
        ),
        (
            "f(\n    a,\n    c\n)\n",
            "f($$$A)",
            "b=1",
            "f(\n    a,\n    c,\n    b=1,\n)\n",
        ),
        ("f(\n    a, c\n)\n", "f($$$A)", "b=1", "f(\n    a, c, b=1\n)\n"),
        ("f(\n    a,  # x\n)\n", "f($$$A)", "b=1", "f(\n    a,  # x\n    b=1,\n)\n"),
        ("f(\n    a  # x\n)\n", "f($$$A)", "b=1", "f(\n    a,  # x\n    b=1,\n)\n"),
        ("x = [1, 2]\n", "[1, 2]", "3", "x = [1, 2, 3]\n"),
        (
            "x = {\n    'a': 1,\n}\n",
            "{'a': 1}",
            "'b': 2",
            "x = {\n    'a': 1,\n    'b': 2,\n}\n",
        ),
        (
            "class A(B):\n    pass\n",
            "class A(B): pass",
            "C",
            "class A(B, C):\n    pass\n",
        ),
        (
            "from m import (\n    B,\n    a,\n)\n",
            "from m import $$$N",
            "C",
            "from m import (\n    B,\n    C,\n    a,\n)\n",
        ),
        (
            "from m import (\n    B,\n    a,\n)\n",
            "from m import $$$N",
            "b",
            "from m import (\n    B,\n    a,\n    b,\n)\n",
        ),
        (
            "from m import (\n    B,\n    a,\n)\n",
            "from m import $$$N",
            "LIMIT",
            "from m import (\n    LIMIT,\n    B,\n    a,\n)\n",
        ),
        ("from m import a, c\n", "from m import $$$N", "b", "from m import a, b, c\n"),
        (
            f"from m import {'a' * 40}, {'c' * 20}\n",
            "from m import $$$N",
            "b" * 20,
            f"from m import (\n    {'a' * 40},\n    {'b' * 20},\n    {'c' * 20},\n)\n",
        ),
    ],
)
def test_an_item_is_added_in_the_layout_of_the_list(
    tmp_path, text, match, item, expected
):
    rule = f"id: a\nwhy: x\nmatch: {match!r}\nadd_item: {item!r}"
    rule = rule.replace("\\n", "\n")
    made = rewrite(tmp_path, rule, text=text)
    assert made == expected


def test_a_parameter_is_added_to_the_definition(tmp_path):
    made = rewrite(
        tmp_path, "id: a\nwhy: x\nin: Pool.touch\nadd_item: hits=0", text=kit.POOL
    )
    assert "def touch(self, blocks, hits=0):" in made


# --- what rules make of Markdown


def page(tmp_path, *items: str, text: str = kit.PAGE) -> str:
    return rewrite(
        tmp_path, *(f"why: x\n{item}" for item in items), text=text, edits=PAGE
    )


def test_a_paragraph_is_replaced(tmp_path):
    made = page(
        tmp_path,
        "id: a\nsection: '## Queue'\nblock: {kind: paragraph}\nreplace: Three.",
    )
    assert made == kit.PAGE.replace("One list.", "Three.")


def test_a_section_body_ends_at_the_next_heading(tmp_path):
    made = page(tmp_path, "id: a\nsection: '## Queue'\nreplace: |\n  New.\n\n  More.")
    assert made == kit.PAGE.replace("One list.\n\n- first\n- second", "New.\n\nMore.")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_places_around_a_section(tmp_path, newline):
    text = kit.PAGE.replace("\n", newline)
    made = page(
        tmp_path,
        "id: a\nsection: '## Queue'\nbefore: Ahead.",
        "id: b\nsection: '## Queue'\nprepend: First.",
        "id: c\nsection: '## Queue'\nappend: Last.",
        "id: d\nsection: '## Queue'\nafter: |\n  ## New\n\n  Behind.",
        "id: e\nsection: '## End'\nappend: Over.",
        text=text,
    )
    assert (
        made.replace("\r\n", "\n")
        == """\
# Pages

Text of the page.

Ahead.

## Queue

First.

One list.

- first
- second

Last.

### Details

```python
## not a heading
```

## New

Behind.

## End

Nothing.

Over.
"""
    )
    assert made.count("\r\n") == (made.count("\n") if newline == "\r\n" else 0)


def test_blocks_by_kind_number_and_regex(tmp_path):
    made = page(
        tmp_path,
        "id: a\nsection: '## Queue'\nblock: {kind: item, nth: 1}\nafter: '- between'",
        "id: b\nsection: '## Queue'\nblock: {kind: item, regex: sec}\nreplace: '- 2nd'",
        "id: c\nsection: '### Details'\nblock: {kind: code}\nreplace: A figure.",
    )
    assert "- first\n- between\n- 2nd\n\n### Details\n\nA figure.\n\n## End" in made


def test_images_tables_and_lines(tmp_path):
    text = (
        "# T\n\n![a](b.png)\n\ntext ![c](d.png)\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
        "> quoted\n"
    )
    made = page(
        tmp_path,
        "id: a\nsection: '# T'\nblock: {kind: image}\nreplace: '![x](y.svg)'",
        "id: b\nsection: '# T'\nblock: {kind: table}\nlines: '^\\| 1'\n"
        "after: '| 3 | 4 |'",
        "id: c\nsection: '# T'\nblock: {kind: quote}\nbefore: Said.",
        text=text,
    )
    assert made == text.replace("![a](b.png)", "![x](y.svg)").replace(
        "| 1 | 2 |\n\n", "| 1 | 2 |\n| 3 | 4 |\n\nSaid.\n\n"
    )


@pytest.mark.parametrize(
    "item, says",
    [
        ("section: '## Gone'\nreplace: x", "0 sections '## Gone'"),
        ("section: '## not a heading'\nreplace: x", "0 sections"),
        ("section: '# Queue'\nreplace: x", "0 sections '# Queue'"),
        ("section: '## Queue'\nblock: {kind: item}\nreplace: x", "matches 2 places"),
        ("section: '## Queue'\nblock: {kind: table}\nreplace: x", "matches 0 places"),
        (
            "section: '## Queue'\nblock: {kind: item, nth: 3}\nreplace: x",
            "matches 0 places",
        ),
        (
            "section: '## Queue'\nblock: {kind: list}\nlines: first|second\nreplace: x",
            "'lines' matches 2 places",
        ),
    ],
)
def test_a_rule_for_markdown_without_exactly_one_place(tmp_path, item, says):
    with pytest.raises(PatchError, match=f"rule 'a' on {PAGE} .*{says}"):
        page(tmp_path, f"id: a\n{item}")


# --- the marks that a rule leaves


def test_marks_are_looked_for_in_the_scope_of_the_rule(tmp_path):
    item = "id: a\nwhy: x\nin: Pool.touch\nprepend: first()"
    edits = Sources(kit.write(tmp_path, kit.rules(item))).edits[0]
    elsewhere = kit.POOL.replace(
        "def touch(blocks):", "def touch(blocks):\n    first()"
    )
    assert engine.marks(elsewhere.encode(), edits, edits.rules) == set()


def test_a_mark_is_not_part_of_a_longer_word(tmp_path):
    item = "id: a\nwhy: x\nin: touch\nprepend: count = 1"
    edits = Sources(kit.write(tmp_path, kit.rules(item))).edits[0]
    other = kit.POOL.replace("(blocks):\n    for", "(blocks):\n    count = 10\n    for")
    assert engine.marks(other.encode(), edits, edits.rules) == set()
