"""What is compiled once and kept, what a model's tokenizer does not allow, and what is too much."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mlserver_torch_stream.engine.constraints.constraint_compiler import ConstraintCompiler
from mlserver_torch_stream.engine.text.reasoning_marks import ReasoningMarks
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.types import Constraint, ConstraintKind
from tests.engine.random_answers import random_answer
from tests.engine.tiny import EOS, byte_tokenizer


def _regex(source: str, field: str = "structured_outputs.regex") -> Constraint:
    return Constraint(ConstraintKind.REGEX, source, field)


def _refused(compiler: ConstraintCompiler, constraint: Constraint) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        compiler.compile(constraint)
    assert caught.value.field == constraint.field
    return caught.value


def test_a_constraint_is_compiled_once_and_the_oldest_are_given_up() -> None:
    compiler = ConstraintCompiler(byte_tokenizer())
    first = compiler.compile(_regex("a+"))
    assert compiler.compile(_regex("a+")) is first
    assert compiler.compile(_regex("a+"), ReasoningMarks("</t>")) is not first
    for number in range(40):
        compiler.compile(_regex(f"b{{{number + 1}}}"))
    assert compiler.compile(_regex("a+")) is not first


def test_sequences_of_one_constraint_do_not_disturb_each_other() -> None:
    compiled = ConstraintCompiler(byte_tokenizer()).compile(_regex("(ab|cd){2}"))
    one, other = compiled.matcher([EOS]), compiled.matcher([EOS])
    letters = byte_tokenizer().convert_tokens_to_ids(list("abcd"))
    one.accept(letters[0])
    assert one.forced == [letters[1]] and not other.forced
    other.accept(letters[2])
    assert other.forced == [letters[3]] and one.forced == [letters[1]]


def test_thousands_of_choices_are_kept_to() -> None:
    tokenizer = byte_tokenizer()
    source = "[" + ", ".join(f'"choice {number} of \\"many\\""' for number in range(3000)) + "]"
    compiled = ConstraintCompiler(tokenizer).compile(Constraint(ConstraintKind.CHOICE, source, "f"))
    for seed in range(5):
        tokens = random_answer(compiled, EOS, seed)
        assert tokens is not None and f'"{tokenizer.decode(tokens)}"'.replace('of "many"', 'of \\"many\\"') in source


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        ("regex", "(" * 300 + "a" + ")*" * 300, "regex"),
        ("regex", "a" * 2**17 + "b", "at most 131072 characters"),
        ("json_schema", '{"type": ["x"]}', "x"),
        ("json_schema", '{"$ref": "https://example.com/schema.json"}', "example.com"),
        ("json_schema", '{"$ref": "file:///etc/hostname"}', "file:///etc/hostname"),
        ("grammar", "start: unknown", "unknown"),
        ("grammar", "root ::= unknown", "nknown"),
    ],
)
def test_what_is_wrong_or_too_much_is_refused_with_a_short_reason(kind: str, source: str, said: str) -> None:
    error = _refused(ConstraintCompiler(byte_tokenizer()), Constraint(ConstraintKind(kind), source, "f"))
    assert said in error.message and len(error.message) < 400


def test_without_the_library_it_is_refused_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    error = _refused(ConstraintCompiler(byte_tokenizer()), _regex("a"))
    assert "pip install 'mlserver-torch-stream[structured]'" in error.message


def _of_words(**more: Any) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": more.pop("end", 2)}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")


@pytest.mark.parametrize(("end", "said"), [(2, "unknown kind"), (9, "holes")])
def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused_by_name(end: int, said: str) -> None:
    assert said in _refused(ConstraintCompiler(_of_words(end=end)), _regex("a")).message
