"""What the compiler caches, what a model's tokenizer does not support, and which constraints exceed the limits."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mlserver_torch_stream.engine.constraints import compile_threads
from mlserver_torch_stream.engine.constraints.compile_threads import CompileThreads, threads_for
from mlserver_torch_stream.engine.constraints.constraint_compiler import ConstraintCompiler
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.types import Constraint, ConstraintKind, ReasoningMarks
from tests.engine.random_answers import random_answer
from tests.engine.tiny import EOS, VOCAB, byte_tokenizer


def _regex(source: str, field: str = "structured_outputs.regex") -> Constraint:
    return Constraint(ConstraintKind.REGEX, source, field)


def _refused(compiler: ConstraintCompiler, constraint: Constraint) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        compiler.submit(constraint).result()
    assert caught.value.field == constraint.field
    return caught.value


def test_a_constraint_is_compiled_once_and_the_oldest_are_given_up() -> None:
    compiler = ConstraintCompiler(byte_tokenizer())
    first = compiler.submit(_regex("a+")).result()
    assert compiler.submit(_regex("a+")).result() is first
    assert compiler.submit(_regex("a+"), ReasoningMarks("</t>")).result() is not first
    for number in range(40):
        compiler.submit(_regex(f"b{{{number + 1}}}")).result()
    assert compiler.submit(_regex("a+")).result() is not first


def test_what_is_asked_for_at_the_same_time_is_compiled_once() -> None:
    compiler = ConstraintCompiler(byte_tokenizer())
    slow = {"type": "object", "properties": {f"a{number}": {"type": "string"} for number in range(300)}}
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(slow), "f")
    first, *others = [each.result(30) for each in [compiler.submit(constraint) for _ in range(8)]]
    assert all(each is first for each in others)
    assert compiler.submit(constraint).done(), "it is known, so that no thread is needed"
    wrong = [compiler.submit(_regex("(" * 300)) for _ in range(4)]
    assert all(isinstance(each.exception(30), InvalidInput) for each in wrong)


def test_sequences_of_one_constraint_do_not_disturb_each_other() -> None:
    compiled = ConstraintCompiler(byte_tokenizer()).submit(_regex("(ab|cd){2}")).result()
    one, other = compiled.matcher([EOS], VOCAB), compiled.matcher([EOS], VOCAB)
    letters = byte_tokenizer().convert_tokens_to_ids(list("abcd"))
    one.accept(letters[0])
    assert list(one.forced) == [letters[1]] and not other.forced
    other.accept(letters[2])
    assert list(other.forced) == [letters[3]] and list(one.forced) == [letters[1]]


@pytest.mark.parametrize("added", [0, 29])
def test_masks_have_one_length_whatever_the_vocabulary_is(added: int) -> None:
    """With 288 tokens, the library allocates one more word of mask than the tokens need, and never writes it."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(added)])
    matcher = ConstraintCompiler(tokenizer).submit(_regex("[ab]{9}")).result().matcher([EOS], VOCAB)
    first = matcher.mask()
    matcher.accept(tokenizer.convert_tokens_to_ids("a"))
    assert len(tokenizer) == 259 + added and len(matcher.mask()) == len(first) == 36


def test_thousands_of_choices_are_kept_to() -> None:
    tokenizer = byte_tokenizer()
    source = "[" + ", ".join(f'"choice {number} of \\"many\\""' for number in range(3000)) + "]"
    compiled = ConstraintCompiler(tokenizer).submit(Constraint(ConstraintKind.CHOICE, source, "f")).result()
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
        ("regex", r"[^\s\S]", "no answer matches it"),
        (
            "json_schema",
            json.dumps({"type": "object", "properties": {str(number): {} for number in range(1000)}}),
            "Current row has",
        ),
        ("grammar", 'start: "a" start', "Too many items"),
        ("json_schema", '{"anyOf": [{"multipleOf": 9973}, {"multipleOf": 99.67}]}', "is above 10000"),
        ("grammar", "root ::= root\n" * 1001, "at most 1000 rules"),
        ("grammar", "start: unknown", "unknown"),
        ("grammar", "root ::= unknown", "nknown"),
    ],
)
def test_what_is_wrong_or_too_much_is_refused_with_a_short_reason(kind: str, source: str, said: str) -> None:
    error = _refused(ConstraintCompiler(byte_tokenizer()), Constraint(ConstraintKind(kind), source, "f"))
    assert said in error.message and len(error.message) < 400


def test_multiples_that_people_write_are_kept_to() -> None:
    schema = {"enum": [1], "anyOf": [{"multipleOf": each} for each in (0.01, 2.5, 12, 60, 86_400, 1e9, -7, 0.25)]}
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema), "f")
    assert ConstraintCompiler(byte_tokenizer()).submit(constraint).result()


@pytest.mark.parametrize("char", ["\x00", "\n", "\x7f", "\u2028", '"', "\\", "/", "é", "🙂"], ids=ascii)
def test_a_choice_may_hold_any_character(char: str) -> None:
    tokenizer = byte_tokenizer()
    source = json.dumps([f"x{char}"], ensure_ascii=False)
    compiled = ConstraintCompiler(tokenizer).submit(Constraint(ConstraintKind.CHOICE, source, "f")).result()
    tokens = random_answer(compiled, EOS, 0)
    assert tokens is not None and tokenizer.decode(tokens) == f"x{char}"


def _chain(link: str, end: str, count: int) -> str:
    return "".join(link.format(number, number + 1) for number in range(count)) + end.format(count)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("grammar", "start: a0\n" + _chain("a{}: a{}\n", 'a{}: "x"', 9000)),
        ("grammar", "root ::= a0\n" + _chain("a{} ::= a{}\n", 'a{} ::= "x"', 998)),
        (
            "json_schema",
            '{"$ref": "#/$defs/0", "$defs": {'
            + _chain('"{}":{{"properties":{{"":{{"$ref":"#/$defs/{}"}}}}}},', '"{}":{{}}', 1500)
            + "}}",
        ),
    ],
    ids=["Lark", "GBNF", "schema"],
)
def test_thousands_of_parts_that_refer_to_each_other_do_not_end_the_process(kind: str, source: str) -> None:
    """The library needs up to 64 MB of stack for such constraints."""
    compiled = ConstraintCompiler(byte_tokenizer()).submit(Constraint(ConstraintKind(kind), source, "f")).result()
    assert compiled.matcher([EOS], VOCAB).mask().any()


def test_few_are_compiled_at_once_and_one_that_is_cancelled_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_threads, "_SPARE_AFTER_S", 10.0)
    threads: CompileThreads[int] = CompileThreads(2)
    held = threading.Event()
    began = []
    first = [threads.submit(lambda: began.append(0) or int(held.wait(30))) for _ in range(2)]
    later = [threads.submit(lambda number=number: began.append(number) or number) for number in (1, 2)]  # type: ignore[misc]
    assert later[0].cancel()
    held.set()
    assert later[1].result(30) == 2 and [each.result(30) for each in first] == [1, 1]
    assert sorted(began) == [0, 0, 2]
    assert threads.submit(lambda: 3).result(30) == 3


def test_a_slow_compilation_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with one thread: while it is busy with a slow compilation, a spare thread compiles the others."""
    monkeypatch.setattr(compile_threads, "_SPARE_AFTER_S", 0.05)
    threads: CompileThreads[int] = CompileThreads(1)
    held = threading.Event()
    slow = threads.submit(lambda: int(held.wait(30)))
    quick = [threads.submit(lambda number=number: number) for number in range(9)]  # type: ignore[misc]
    assert [each.result(20) for each in quick] == list(range(9)) and not slow.done()
    second, third = (threads.submit(lambda: int(held.wait(30))) for _ in range(2))
    second.begun.result(20)
    assert not wait([third.begun], timeout=0.3).done
    held.set()
    assert [each.result(20) for each in (slow, second, third)] == [1, 1, 1]


def test_a_compilation_waits_where_the_spare_thread_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next compilation starts the spare thread. If there is no thread at all, it is refused."""
    monkeypatch.setattr(compile_threads, "_SPARE_AFTER_S", 0.05)
    threads: CompileThreads[int] = CompileThreads(1)
    held = threading.Event()
    slow = threads.submit(lambda: int(held.wait(30)))

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        quick = [threads.submit(lambda: 2)]
        with pytest.raises(RuntimeError, match="new thread"):
            CompileThreads[int](1).submit(lambda: 1)
    quick.append(threads.submit(lambda: 3))
    assert [each.result(20) for each in quick] == [2, 3] and not slow.done()
    held.set()
    assert slow.result(20) == 1


def test_the_spare_thread_compiles_nothing_while_the_others_get_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_threads, "_SPARE_AFTER_S", 5.0)
    threads: CompileThreads[int] = CompileThreads(1)
    held = threading.Event()  # a thread that has nothing to do ends
    used = [threads.submit(lambda: (held.wait(30) and time.sleep(0.01)) or threading.get_ident()) for _ in range(30)]
    held.set()
    assert len({each.result(30) for each in used}) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only there a thread has a priority of its own")
def test_no_thread_has_a_lower_priority_than_the_others_while_it_compiles() -> None:
    """Such a thread would hold the interpreter's lock but get no core, and all streams would wait for it."""
    compiler = ConstraintCompiler(byte_tokenizer())
    before = set(os.listdir("/proc/self/task"))
    found: set[int] = set()
    for count in range(300, 400):  # a busy machine may let this thread look only when the first has been compiled
        parts = {f"a{number}": {"type": "string", "pattern": "^[a-z]{2,40}$"} for number in range(count)}
        source = json.dumps({"type": "object", "properties": parts, "required": list(parts)})
        compiling = compiler.submit(Constraint(ConstraintKind.JSON_SCHEMA, source, "f"))
        while not compiling.done():
            for thread in set(os.listdir("/proc/self/task")) - before:
                with contextlib.suppress(ProcessLookupError):
                    found.add(os.getpriority(os.PRIO_PROCESS, int(thread)))
        assert compiling.result()
        if found:
            break
    assert found == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_one_core_is_left_to_the_streams() -> None:
    assert [threads_for(cores) for cores in (1, 2, 3, 64)] == [1, 1, 2, 2]


def test_a_process_ends_while_something_is_compiled() -> None:
    module = CompileThreads.__module__
    code = f"import time; from {module} import CompileThreads; CompileThreads(2).submit(lambda: time.sleep(60))"
    subprocess.run([sys.executable, "-c", code], timeout=50, check=True)


def test_without_the_library_it_is_refused_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    error = _refused(ConstraintCompiler(byte_tokenizer()), _regex("a"))
    assert "pip install 'mlserver-torch-stream[structured]'" in error.message


def _of_words(**more: Any) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": more.pop("end", 2)}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")


@pytest.mark.parametrize(("end", "said"), [(2, "unknown kind"), (9, "gaps")])
def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused_by_name(end: int, said: str) -> None:
    assert said in _refused(ConstraintCompiler(_of_words(end=end)), _regex("a")).message
