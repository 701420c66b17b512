"""Converts prompts of every kind to token ids, and token ids to text. Applies the chat template.

Knows nothing of the model or the engine; wraps one transformers tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from mlserver_torch_stream.engine.constraints.compile_threads import Compilation
from mlserver_torch_stream.engine.constraints.compiled_constraint import CompiledConstraint
from mlserver_torch_stream.engine.constraints.constraint_compiler import ConstraintCompiler
from mlserver_torch_stream.engine.text.answer_format import AnswerFormat
from mlserver_torch_stream.engine.text.chat_format import AUTO, ChatFormat
from mlserver_torch_stream.engine.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from mlserver_torch_stream.engine.text.reasoning_marks import ReasoningMarks
from mlserver_torch_stream.engine.text.token_bytes import TokenBytes
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.types import ChatPrompt, Constraint, Prompt, TextPrompt, TokensPrompt

_HOLD_AT_LEAST = 4  # tokens at the end of an unfinished text, which further text can still change
_HOLD_AT_MOST = 64
_ENDING = 16  # tokens at the end of a conversation, in which a reasoning may begin


class TextCodec:
    """One tokenizer and its chat template.

    The messages of a ``ChatPrompt`` are at least one, and the content of each is one string.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tool_parser: str = AUTO, reasoning_parser: str = AUTO
    ) -> None:
        """``tool_parser`` and ``reasoning_parser`` are the settings' values."""
        self.chat_format = ChatFormat(tokenizer, tool_parser, reasoning_parser)
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer)
        self._constraints = ConstraintCompiler(tokenizer)

    @cached_property
    def vocab_size(self) -> int:
        """The highest id and 1, added tokens included: more than the number of tokens where ids have holes."""
        ids: Iterable[int] = self._tokenizer.get_vocab().values()
        return max(ids) + 1

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that ``decode`` leaves out with ``skip_special_tokens``."""
        added = self._tokenizer.added_tokens_decoder
        special = {token_id for token_id, token in added.items() if token.special}
        return frozenset(special | set(self._tokenizer.all_special_ids))

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Returns the prompt's ids. Raises InvalidInput if the tokenizer or the chat template refuses the prompt."""
        if isinstance(prompt, TokensPrompt):
            return prompt.token_ids
        if isinstance(prompt, TextPrompt):
            return _ids(self._tokenize(prompt.text, "text_input"))
        return self._encode_chat(prompt)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Returns the text of ``ids``, with the spaces that the tokens have."""
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def detokenizer(self, skip_special_tokens: bool, marks: frozenset[int] = frozenset()) -> Detokenizer:
        """Returns the detokenizer of one sequence. ``marks``: special tokens that are not skipped."""
        silent = self.special_ids - marks if skip_special_tokens else frozenset[int]()
        if self._token_bytes.join_to_text:
            return ByteDetokenizer(self.token_bytes, silent)
        return WindowDetokenizer(partial(self.decode, skip_special_tokens=skip_special_tokens and not marks), silent)

    def answer_format(self, prompt: ChatPrompt, ids: Sequence[int], constraint: Constraint | None) -> AnswerFormat:
        """Returns how the answer to a conversation of these ids is divided; ``constraint`` is what its text must match.

        Raises InvalidInput where calls and such a text do not go together.
        """
        return self.chat_format.answer(prompt, self.decode(ids[-_ENDING:], skip_special_tokens=False), constraint)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token; a special token's are those of its name."""
        return self._token_bytes.of(token_id)

    def bad_words_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the ids of each word, as it is tokenized at the start of a text and after a space."""
        spellings = [spelling for word in words if word.strip() for spelling in (word, " " + word.lstrip())]
        encoded = [self._plain(spelling, "bad_words") for spelling in spellings]
        return tuple(dict.fromkeys(ids for ids in encoded if ids))

    def prepare_constraints(self) -> None:
        """Does the work for which the first request with a constraint, and all requests beside it, would wait."""
        self._constraints.prepare()

    def submit(
        self, constraint: Constraint, reasoning: ReasoningMarks | None = None
    ) -> Compilation[CompiledConstraint]:
        """Begins to compile what an answer must match, after a reasoning with the marks ``reasoning`` if given.

        The compilation may raise InvalidInput.
        """
        return self._constraints.submit(constraint, reasoning)

    def stable_prefix(self, text_so_far: str) -> tuple[int, ...]:
        """Returns the ids at the start of an unfinished prompt that further text is unlikely to change.

        The last word and the whitespace before it are left out, at least 4 and at most 64 tokens. Further text can
        still change the ids that are returned, so the caller compares them with those of the whole prompt.
        """
        encoded = self._tokenize(text_so_far, "text_input", return_offsets_mapping=self._tokenizer.is_fast)
        ids = _ids(encoded)
        hold = _HOLD_AT_MOST
        if self._tokenizer.is_fast:
            hold = len(ids) - _tokens_before(_last_word(text_so_far), encoded["offset_mapping"])
        return ids[: max(0, len(ids) - min(max(hold, _HOLD_AT_LEAST), _HOLD_AT_MOST))]

    def _tokenize(self, text: str, field: str, **options: Any) -> Mapping[str, Any]:
        """Tokenizes a raw prompt. A prompt that begins with BOS gets no special tokens added."""
        _require_unicode(text, field)
        bos = self._tokenizer.bos_token
        add_special_tokens = not (bos and text.startswith(str(bos)))
        encoded: Mapping[str, Any] = self._tokenizer(text, add_special_tokens=add_special_tokens, **options)
        return encoded

    def _plain(self, text: str, field: str) -> tuple[int, ...]:
        """Returns the ids of the text without special tokens added."""
        _require_unicode(text, field)
        return _ids(self._tokenizer(text, add_special_tokens=False))

    def _encode_chat(self, prompt: ChatPrompt) -> tuple[int, ...]:
        # The template either opens a new assistant message or continues the last one.
        continues = prompt.messages[-1].get("role") == "assistant"
        tools = [dict(tool) for tool in prompt.tools] if prompt.tools is not None else None
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in prompt.messages],
                tools=tools,
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **prompt.template_kwargs,
            )
        except Exception as error:  # a template is a program that runs on the client's data, and can raise any error
            raise InvalidInput("messages", f"the chat template refused them: {_reason(error)}") from error
        return self._plain(str(text), "messages")


def _ids(encoded: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(token_id) for token_id in encoded["input_ids"])


def _last_word(text: str) -> int:
    """Returns the position of the whitespace before the last word, in characters."""
    words = text.rsplit(maxsplit=1)
    return len(words[0]) if len(words) == 2 else 0


def _tokens_before(end: int, offsets: Sequence[tuple[int, int]]) -> int:
    """Counts the leading tokens that lie before character ``end``."""
    return next((i for i, (_, stop) in enumerate(offsets) if stop > end), len(offsets))


def _require_unicode(text: str, field: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInput(field, "is not valid Unicode: it holds half of a surrogate pair") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
