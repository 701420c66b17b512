"""Prompts of every kind become the ids that the tokenizer and the chat template define."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.types import ChatPrompt, TextPrompt, TokensPrompt
from tests.engine.tiny_tokenizers import byte_fallback, byte_level

_TEMPLATE = (
    "{% if tools %}tools:{{ tools | length }}\n{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ mood }}{% endif %}"
)


def _chat_codec(template: str = _TEMPLATE) -> TextCodec:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    return TextCodec(tokenizer)


def _rendered(codec: TextCodec, *messages: dict[str, Any], **options: Any) -> str:
    return codec.decode(codec.encode(ChatPrompt(messages, **options)), skip_special_tokens=False)


def test_text_has_the_tokenizers_special_tokens() -> None:
    tokenizer = byte_level(bos=True)
    ids = TextCodec(tokenizer).encode(TextPrompt("the fox"))
    assert list(ids) == tokenizer("the fox")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("build", [lambda: byte_level(bos=True), byte_fallback])
def test_bos_in_the_text_is_not_doubled(build: Callable[[], PreTrainedTokenizerBase]) -> None:
    tokenizer = build()
    ids = TextCodec(tokenizer).encode(TextPrompt("<s>the fox"))
    assert list(ids[:2]).count(tokenizer.bos_token_id) == 1
    assert list(ids) == tokenizer("<s>the fox", add_special_tokens=False)["input_ids"]


def test_text_without_bos_in_a_tokenizer_that_adds_none_stays_so() -> None:
    assert list(TextCodec(byte_level()).encode(TextPrompt("<s><s>the")))[:3].count(0) == 2


def test_token_ids_stay_as_they_are() -> None:
    assert TextCodec(byte_level()).encode(TokensPrompt((5, 4, 3))) == (5, 4, 3)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"text_input: .*surrogate"):
        TextCodec(byte_level()).encode(TextPrompt("a\ud800b"))
    with pytest.raises(InvalidInput, match="messages"):
        _chat_codec().encode(ChatPrompt(({"role": "user", "content": "a\ud800b"},)))


def test_a_chat_ends_with_the_generation_prompt() -> None:
    codec = _chat_codec()
    assert codec.has_chat_template
    assert _rendered(codec, {"role": "user", "content": "hi"}) == "<|user|>hi</s><|assistant|>"


def test_tools_and_template_arguments_reach_the_template() -> None:
    text = _rendered(
        _chat_codec(), {"role": "user", "content": "hi"}, tools=({"type": "function"},), template_kwargs={"mood": "gay"}
    )
    assert text == "tools:1\n<|user|>hi</s><|assistant|>gay"


def test_an_assistants_last_message_is_continued() -> None:
    text = _rendered(_chat_codec(), {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "})
    assert text == "<|user|>hi</s><|assistant|>Well, "


def test_special_tokens_of_a_template_are_not_doubled() -> None:
    tokenizer = byte_level(bos=True)
    tokenizer.chat_template = "<s>{{ messages[0].content }}"
    codec = TextCodec(tokenizer)
    assert list(codec.encode(ChatPrompt(({"role": "user", "content": "x"},)))).count(0) == 1


def test_a_tokenizer_without_a_template_says_so() -> None:
    assert not TextCodec(byte_level()).has_chat_template


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].name.first }}", "refused"),
        ("{{ messages[0]['content'] + 1 }}", "refused"),
        ("{% broken", "refused"),
    ],
)
def test_what_a_template_refuses_is_the_clients_error(template: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=f"messages: .*{reason}"):
        _rendered(_chat_codec(template), {"role": "user", "content": "x"})


def test_the_prompts_objects_are_not_changed() -> None:
    message = {"role": "assistant", "content": "a"}
    _rendered(_chat_codec(), message)
    assert message == {"role": "assistant", "content": "a"}


def test_bad_words_are_spelled_with_and_without_a_space() -> None:
    tokenizer = byte_level()
    ids = TextCodec(tokenizer).bad_words_ids(["fox", " "])
    assert {tokenizer.decode(list(word)) for word in ids} == {"fox", " fox"}


def test_special_ids_are_what_a_decode_leaves_out() -> None:
    codec = TextCodec(byte_level())
    assert codec.special_ids == {0, 1}
    assert codec.decode([0, 1], True) == ""


def test_the_vocabulary_reaches_to_the_highest_id_where_ids_have_holes() -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 9}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.add_tokens(["d"])
    codec = TextCodec(tokenizer)
    assert codec.vocab_size == max(codec.encode(TextPrompt("c")) + codec.encode(TextPrompt("d"))) + 1 > len(tokenizer)
    assert codec.decode([9, 5], False) == "c"


def test_the_vocabulary_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, reads = byte_level(), list[dict[str, int]]()
    read = tokenizer.get_vocab

    def get_vocab() -> dict[str, int]:
        reads.append(read())
        return reads[-1]

    monkeypatch.setattr(tokenizer, "get_vocab", get_vocab)
    codec = TextCodec(tokenizer)
    codec.limit_prompts(100)
    assert codec.vocab_size == len(tokenizer) and len(reads) == 1
