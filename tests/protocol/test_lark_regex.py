"""A Lark grammar becomes one regular expression, which the library of constraints accepts as a pattern."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise

import llguidance
import pytest

from mlserver_torch_stream.protocol.lark_regex import regex_of_lark

_PATCH = """
// As an agent that writes patches sends it.
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk
    | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (context | change_line)+ eof_line?
context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""


@pytest.mark.parametrize(
    ("definition", "matching", "others"),
    [
        (
            _PATCH,
            [
                "*** Begin Patch\n*** Add File: a.py\n+x = 1\n+\n*** End Patch\n",
                "*** Begin Patch\n*** Update File: b\n@@ def f\n-a\n+b\n c\n*** End of File\n*** End Patch",
            ],
            ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: \n+x\n*** End Patch"],
        ),
        ('start: WORD " "~1..2 INT\n%import common.WORD\n%import common.INT -> INT', ["ab  12"], ["ab 12 ", "ab   1"]),
        ('start: ["a"i] /b\\/[^\\/]/i "." -> end\n', ["Ab/x.", "B/x."], ["ab//.", "ab/xx"]),
        ("start: one? two\none: \"1\"\n!two.2: \"2\" | one one", ["12", "11", "111"], ["", "1"]),
    ],
)  # fmt: skip
def test_the_expression_matches_what_the_grammar_does(definition: str, matching: list[str], others: list[str]) -> None:
    expression = regex_of_lark(definition)
    for text in matching:
        assert re.fullmatch(expression, text), text
    for text in others:
        assert not re.fullmatch(expression, text), text
    schema = json.dumps({"type": "string", "pattern": f"^(?:{expression})$"})
    assert not llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_json_schema(schema))


@pytest.mark.parametrize(
    ("definition", "said"),
    [
        ('start: "(" start ")" | "x"', "refers to itself"),
        ("start: other", "has no rule other"),
        ("other: \"a\"", "has no rule start"),
        ('start: "a"\n%ignore WS', "has %ignore"),
        ('start: ("a"', "cannot be read"),
        ('start: "a" &', "cannot be read at '&'"),
        ('start: "\\q"', "which cannot be read"),
        (
            "start: a a\n" + "".join(f"{x}: {y} {y} {y}\n" for x, y in pairwise("abcdefghij")) + 'j: "x"',
            "more than 65536 characters",
        ),
        ("start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(200)) + 'a200: "x"', "rules within each other"),
        ('start: "a" )(', "not balanced"),
        ("start: " + "(" * 9_000 + '"a"' + ")" * 9_000, "cannot be read"),
        ("x" * 70_000, "has more than"),
    ],
)  # fmt: skip
def test_what_is_no_expression_is_said(definition: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        regex_of_lark(definition)


def test_a_grammar_of_large_classes_is_read_at_once() -> None:
    """Compiling its expression would take a minute, in which the server answers no one."""
    began = time.process_time()
    regex_of_lark("start: /" + "[a-\U0001f000]" * 6_000 + "/i")
    assert time.process_time() - began < 10
