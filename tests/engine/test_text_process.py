"""What a model's files do with text has limits of time and memory, and prompts are measured before tokenization."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlserver_torch_stream.engine.text import text_process, text_process_main, tokenizer
from mlserver_torch_stream.engine.text.text_process import TextProcesses
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.engine.text.tokenizer_limits import backtracks
from mlserver_torch_stream.errors import ContextLengthExceeded, GenerationFailed, InvalidInput, LoadFailed
from mlserver_torch_stream.types import ChatPrompt, TextPrompt
from tests.engine.tiny_tokenizers import byte_level
from tests.waiting import child_pids

_HELLO = ChatPrompt(({"role": "user", "content": "hello"},))
_LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
_DOUBLES = (
    "{% set ns = namespace(x='abcdefgh') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
)
_GPT4 = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))"


def _chat(template: str) -> TextCodec:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    return TextCodec(tokenizer)


def _splits(expression: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.mark.long
@pytest.mark.parametrize("template", [_LOOPS, "{{ 'a' * 10 ** 10 }}", _DOUBLES, "{{ 'a'.ljust(10 ** 10) }}"])
def test_a_template_without_end_fails_its_own_request_and_the_next_is_rendered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, template: str
) -> None:
    monkeypatch.setattr(text_process, "MAX_SECONDS", 3.0)
    with pytest.raises(GenerationFailed, match="messages: the model's chat template"):
        _chat(template).encode(_HELLO)
    monkeypatch.setattr(text_process, "MAX_SECONDS", 60.0)
    assert len(caplog.records) == 1
    assert _chat("{{ messages[0].content }}").encode(_HELLO) == _chat("hello").encode(_HELLO)


@pytest.mark.long
def test_what_a_template_makes_is_measured_before_it_is_tokenized() -> None:
    codec = _chat("{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}")
    codec.limit_prompts(100)
    with pytest.raises(ContextLengthExceeded, match="messages: the prompt has at least"):
        codec.encode(_HELLO)


def test_an_expression_that_panics_fails_its_own_request_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    codec = TextCodec(_splits("(a+)+$"))
    assert codec.blocks(TextPrompt("short"))
    with pytest.raises(GenerationFailed, match="text_input: the model's tokenizer failed"):
        codec.encode(TextPrompt("a" * 60 + "b"))
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()
    plain = byte_level()
    assert list(codec.encode(TextPrompt("the fox"))) == plain("the fox")["input_ids"]


def test_a_panic_in_the_servers_own_process_is_an_error_of_the_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No check finds this expression suspicious."""
    monkeypatch.setattr(tokenizer, "may_be_slow", lambda tokenizer: False)
    with pytest.raises(GenerationFailed, match="text_input: the model's tokenizer failed"):
        TextCodec(_splits("(a+)+$")).encode(TextPrompt("a" * 60 + "b"))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("steps", [4, pytest.param(9, marks=pytest.mark.long)])
def test_a_tokenizer_that_makes_texts_very_much_longer_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """With three steps, the tokenizer is loaded, and tokenizes long texts in a process with limited memory."""

    def grows(count: int) -> PreTrainedTokenizerFast:
        tokenizer = byte_level()
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Replace("a", "a" * 10) for _ in range(count)]
        )
        return tokenizer

    with pytest.raises(LoadFailed, match="the tokenizer's normalizer can make a text"):
        TextCodec(grows(steps))
    monkeypatch.setattr(text_process, "MAX_BYTES", 2**28)
    monkeypatch.setattr(text_process, "MAX_SECONDS", 60.0)  # on a busy machine the memory's limit has to come first
    with pytest.raises(GenerationFailed, match="text_input: the model's tokenizer needed more than"):
        TextCodec(grows(3)).encode(TextPrompt("a" * 100_000))
    assert len(TextCodec(grows(2)).encode(TextPrompt("a"))) > 10


@pytest.mark.parametrize("letter", ["x", "the fox "])
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(letter: str) -> None:
    """The prompt is refused by the number of its characters, or by the tokens of its beginning."""
    codec = TextCodec(byte_level())
    codec.limit_prompts(1000)
    for text in (letter * 1_000_000, letter * 9000):
        with pytest.raises(ContextLengthExceeded, match="text_input: the prompt has at least"):
            codec.encode(TextPrompt(text))
        with pytest.raises(ContextLengthExceeded, match="text_input: the prompt has at least"):
            codec.check_length(text, "text_input")
    assert len(codec.encode(TextPrompt("x" * 900))) == 900


def test_a_template_that_refuses_is_the_clients_fault() -> None:
    with pytest.raises(InvalidInput, match="messages: the chat template refused the messages: no system"):
        _chat("{{ raise_exception('no system') }}").encode(_HELLO)


@pytest.mark.long
def test_a_template_may_write_any_text_but_half_a_character() -> None:
    assert _chat("é日\U0001f600\n\\n").encode(_HELLO) == TextCodec(byte_level()).encode(
        TextPrompt("é日\U0001f600\n\\n")
    )
    with pytest.raises(InvalidInput, match="messages: "):
        _chat(r"{{ '\ud800' }}").encode(_HELLO)
    assert _chat("hello").encode(_HELLO) == TextCodec(byte_level()).encode(TextPrompt("hello"))


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|a)*$", r"(a?){50}b", r"a*a*a*b", r"((ab)*)*", r"(?:[^x]+){10,}"])
def test_expressions_that_backtrack_without_end_are_recognised(pattern: str) -> None:
    assert backtracks(pattern)


@pytest.mark.parametrize("pattern", [_GPT4, _O200K, r" ?[^(\s|[.,!?])]+", r"[0-9][0-9][0-9]", r"[\]+*]+", r"\(a+\)+"])
def test_expressions_of_known_models_are_not_suspected(pattern: str) -> None:
    assert not backtracks(pattern)


def _render(processes: TextProcesses, content: str) -> str:
    conversation = [{"role": "user", "content": content}]
    return str(processes.run("render", conversations=[conversation], chat_template="{{ messages[0].content }}"))


@pytest.mark.long
def test_what_python_prints_at_its_start_is_no_reply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The ``sitecustomize`` of a container image or a library may print something."""
    (tmp_path / "sitecustomize.py").write_text("print('welcome')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert _render(TextProcesses(), "hello") == "hello"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="finds the process in /proc")
def test_a_process_that_reads_no_job_fails_it_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is longer than the pipe's buffer."""
    monkeypatch.setattr(text_process, "MAX_SECONDS", 60.0)
    processes, before = TextProcesses(), child_pids(os.getpid())
    assert _render(processes, "hello") == "hello"
    (started,) = set(child_pids(os.getpid())) - set(before)
    os.kill(started, signal.SIGSTOP)
    with monkeypatch.context() as patch, pytest.raises(GenerationFailed, match="took longer than 1 s"):
        patch.setattr(text_process, "MAX_SECONDS", 1.0)
        _render(processes, "x" * 10_000_000)
    assert _render(processes, "hello") == "hello"
    assert started not in child_pids(os.getpid())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no limit of address space")
@pytest.mark.parametrize(
    ("limit", "statm"), [(2**30, "/proc/self/statm"), (-1, "/not/mounted"), (2**30, "/not/mounted")]
)
def test_memory_is_limited_below_the_servers_own_limit_and_without_proc(limit: int, statm: str) -> None:
    script = f"""
import resource, pathlib
from {text_process_main.__name__} import _limit_memory
import {text_process_main.__name__} as main
main._STATM = pathlib.Path({statm!r})
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
_limit_memory(2**30)
print(resource.getrlimit(resource.RLIMIT_AS)[0])"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert printed.returncode == 0, printed.stderr
    assert 0 < int(printed.stdout) <= (limit if limit > 0 else 2**31)
