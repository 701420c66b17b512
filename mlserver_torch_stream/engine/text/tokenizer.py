"""Text to token ids and back: prompts of every kind, chat templates, whole decodes.

Knows nothing of the model or the engine; wraps one transformers tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.types import ChatPrompt, Prompt, TextPrompt, TokensPrompt

_HOLD_AT_LEAST = 4  # tokens at the end of a piece of text that later text could still change
_HOLD_AT_MOST = 64
_TEMPLATE_SWITCHES = ("add_generation_prompt", "continue_final_message")
_RESERVED = frozenset({"conversation", "messages", "tools", "chat_template", "tokenize", "return_dict"}) | frozenset(
    {"return_tensors", "padding", "truncation", "max_length", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)


class TextCodec:
    """One tokenizer, with the chat template in force: ``chat_template`` if given, else the tokenizer's own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._silent_ids: frozenset[int] | None = None

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_template or self._tokenizer.chat_template)

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that ``decode`` leaves out with ``skip_special_tokens``."""
        if self._silent_ids is None:
            added = self._tokenizer.added_tokens_decoder
            special = {token_id for token_id, token in added.items() if token.special}
            self._silent_ids = frozenset(special | set(self._tokenizer.all_special_ids))
        return self._silent_ids

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's ids. Raises InvalidInput for what the tokenizer or the chat template refuses."""
        if isinstance(prompt, TokensPrompt):
            return prompt.token_ids
        if isinstance(prompt, TextPrompt):
            return _ids(self._tokenize(prompt.text, "text_input"))
        return self._encode_chat(prompt)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of ``ids``, spaces as the tokens have them."""
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def bad_words_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The id sequences of each word as it is written at the start of a text and after a space."""
        spellings = [spelling for word in words if word.strip() for spelling in (word, " " + word.lstrip())]
        encoded = [self._plain(spelling, "bad_words") for spelling in spellings]
        return tuple(dict.fromkeys(ids for ids in encoded if ids))

    def stable_prefix(self, text_so_far: str) -> tuple[int, ...]:
        """Ids at the start of the prompt that further text will hardly change, for prefilling ahead.

        Holds back the last word and the whitespace before it, at least 4 and at most 64 tokens. Not a guarantee:
        compare with the ids of the whole prompt in the end.
        """
        encoded = self._tokenize(text_so_far, "text_input", return_offsets_mapping=self._tokenizer.is_fast)
        ids = _ids(encoded)
        hold = _HOLD_AT_MOST
        if self._tokenizer.is_fast:
            hold = len(ids) - _tokens_before(_last_word(text_so_far), encoded["offset_mapping"])
        return ids[: max(0, len(ids) - min(max(hold, _HOLD_AT_LEAST), _HOLD_AT_MOST))]

    def _tokenize(self, text: str, field: str, **options: Any) -> Mapping[str, Any]:
        """The tokenizer's output for a raw prompt; one that brings its own BOS gets no special tokens added."""
        _require_unicode(text, field)
        bos = self._tokenizer.bos_token
        add_special_tokens = not (bos and text.startswith(str(bos)))
        encoded: Mapping[str, Any] = self._tokenizer(text, add_special_tokens=add_special_tokens, **options)
        return encoded

    def _plain(self, text: str, field: str) -> tuple[int, ...]:
        """The ids of the text alone."""
        _require_unicode(text, field)
        return _ids(self._tokenizer(text, add_special_tokens=False))

    def _encode_chat(self, prompt: ChatPrompt) -> tuple[int, ...]:
        if not self.has_chat_template:
            raise InvalidInput("messages", "this model has no chat template; send a raw prompt instead")
        if not prompt.messages:
            raise InvalidInput("messages", "must hold at least one message")
        messages = [_flatten(message) for message in prompt.messages]
        options = _template_options(messages[-1], prompt.template_kwargs)
        tools = [dict(tool) for tool in prompt.tools] if prompt.tools is not None else None
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self._chat_template, tokenize=False, **options
            )
        except Exception as error:  # a template is a program that runs on the client's data: whatever it raises
            raise InvalidInput("messages", f"the chat template refused them: {_reason(error)}") from error
        return self._plain(str(text), "messages")


def _ids(encoded: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(token_id) for token_id in encoded["input_ids"])


def _last_word(text: str) -> int:
    """Where the whitespace before the last word begins, in characters."""
    words = text.rsplit(maxsplit=1)
    return len(words[0]) if len(words) == 2 else 0


def _tokens_before(end: int, offsets: Sequence[tuple[int, int]]) -> int:
    """How many leading tokens lie before character ``end``."""
    return next((i for i, (_, stop) in enumerate(offsets) if stop > end), len(offsets))


def _flatten(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the message whose content is one string, if it was a list of text parts."""
    flat = dict(message)
    content = flat.get("content")
    if isinstance(content, list | tuple):
        flat["content"] = "\n".join(_part_text(part) for part in content)
    return flat


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidInput("messages", f"a content part of type {kind!r} is not supported: this model takes text only")


def _template_options(last: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The template's arguments: the client's, and whether to open a new answer or go on with the last message."""
    reserved = sorted(_RESERVED.intersection(given))
    if reserved:
        raise InvalidInput("chat_template_kwargs", f"{', '.join(reserved)} cannot be set by a request")
    going_on = last.get("role") == "assistant" and isinstance(last.get("content"), str)
    defaults = {"add_generation_prompt": not going_on, "continue_final_message": going_on}
    switched = any(name in given for name in _TEMPLATE_SWITCHES)
    return {**(dict.fromkeys(_TEMPLATE_SWITCHES, False) if switched else defaults), **given}


def _require_unicode(text: str, field: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInput(field, "is not valid Unicode: it holds half of a surrogate pair") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
