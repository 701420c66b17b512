"""Converts prompts of every kind to token ids, and token ids to text. Applies the chat template."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from mlserver_torch_stream.engine.constraints.compile_threads import Compilation
from mlserver_torch_stream.engine.constraints.constraint_compiler import ConstraintCompiler
from mlserver_torch_stream.engine.constraints.token_bytes import TokenBytes
from mlserver_torch_stream.engine.constraints.token_matcher import CompiledConstraint
from mlserver_torch_stream.engine.machine import trim_heap
from mlserver_torch_stream.engine.shared_pool import PROCESS
from mlserver_torch_stream.engine.text.answer_format import AnswerFormat
from mlserver_torch_stream.engine.text.chat_format import AUTO, ChatFormat
from mlserver_torch_stream.engine.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from mlserver_torch_stream.engine.text.text_process import JobRefused, TextProcesses
from mlserver_torch_stream.engine.text.tokenizer_limits import expansion, may_be_slow
from mlserver_torch_stream.errors import ContextLengthExceeded, GenerationFailed, InvalidInput, NotServing
from mlserver_torch_stream.types import ChatPrompt, Constraint, Prompt, ReasoningMarks, TextPrompt, TokensPrompt

logger = logging.getLogger(__name__)

_MAX_NORMALIZED = 2**26  # characters that this process tokenizes at a time, which takes up to 140 bytes for each
_MAX_THREADS = 2
_CHARACTERS_PER_TOKEN = 8  # more than any language has on average
_MAY_SHRINK = 4  # times that a normalizer may make a text shorter
_LONG = 2**18  # characters: to tokenize them leaves some 30 MB of free blocks in the heap
_TRIM_AFTER_S = 1.0
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
        """``tool_parser`` and ``reasoning_parser`` are the settings' values.

        Raises LoadFailed if the tokenizer can make a text very much longer.
        """
        self._expansion = expansion(tokenizer)
        self._may_be_slow = may_be_slow(tokenizer)
        self.chat_format = ChatFormat(tokenizer, tool_parser, reasoning_parser)
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer)
        self._constraints = ConstraintCompiler(tokenizer)
        self._tokenizing = TextProcesses(lambda: str(tokenizer.backend_tokenizer.to_str()))
        self._max_tokens: int | None = None
        self._max_characters = 0
        self.executor = ThreadPoolExecutor(_MAX_THREADS, "tokenizer")
        """Where long prompts and those that ``blocks`` says are encoded, a few at a time."""

    def limit_prompts(self, max_tokens: int) -> None:
        """Refuses texts of more tokens than ``max_tokens`` from now on, before they are tokenized as a whole."""
        longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        shrinks = not self._tokenizer.is_fast or self._tokenizer.backend_tokenizer.normalizer is not None
        self._max_characters = max_tokens * longest * (_MAY_SHRINK if shrinks else 1)
        self._max_tokens = max_tokens

    def blocks(self, prompt: Prompt) -> bool:
        """Whether encoding this prompt waits for another process, which the event loop must not."""
        return isinstance(prompt, ChatPrompt) or (self._may_be_slow and isinstance(prompt, TextPrompt))

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
        """Returns the prompt's ids.

        Raises InvalidInput if the prompt is too long or the chat template refuses it, and GenerationFailed if the
        model's tokenizer or template fails on it.
        """
        if isinstance(prompt, TokensPrompt):
            return prompt.token_ids
        if isinstance(prompt, TextPrompt):
            adds = prompt.add_special_tokens
            return self._ids(
                prompt.text, "text_input", self._adds_special_tokens(prompt.text) if adds is None else adds
            )
        return self._ids(self._rendered(prompt), prompt.field, prompt.add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Returns the text of ``ids``, with the spaces that the tokens have."""
        try:
            text = self._tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        except BaseException as error:
            raise _as_failure(error, "these tokens") from None
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

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Returns the tokens as the vocabulary has them."""
        return [str(token) for token in self._tokenizer.convert_ids_to_tokens(list(ids))]

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
        self._check_length(text_so_far, "text_input")
        ids, offsets = self._tokenize(text_so_far, "text_input", self._adds_special_tokens(text_so_far))
        hold = len(ids) - _tokens_before(_last_word(text_so_far), offsets) if offsets else _HOLD_AT_MOST
        return ids[: max(0, len(ids) - min(max(hold, _HOLD_AT_LEAST), _HOLD_AT_MOST))]

    def _adds_special_tokens(self, text: str) -> bool:
        """Whether special tokens are added to a raw prompt: not to one that begins with BOS."""
        bos = self._tokenizer.bos_token
        return not (bos and text.startswith(str(bos)))

    def _plain(self, text: str, field: str) -> tuple[int, ...]:
        """Returns the ids of the text without special tokens added."""
        return self._tokenize(text, field, False)[0]

    def _ids(self, text: str, field: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Returns the ids of a whole prompt, and gives the memory that a long one has taken back to the system."""
        try:
            self._check_length(text, field)
            return self._tokenize(text, field, add_special_tokens)[0]
        finally:
            if len(text) > _LONG:  # once its request's body is free, too
                later = threading.Timer(_TRIM_AFTER_S, trim_heap)
                later.daemon = True
                later.start()

    def _check_length(self, text: str, field: str) -> None:
        """Raises ContextLengthExceeded if the text has too many characters, or its beginning too many tokens."""
        limit = self._max_tokens
        if limit is None or len(text) <= limit:
            return
        tokens = -(-len(text) * limit // self._max_characters)
        if tokens <= limit and len(text) > _CHARACTERS_PER_TOKEN * limit:
            beginning = text[: _CHARACTERS_PER_TOKEN * limit]
            tokens = len(self._plain(beginning, field)) - _HOLD_AT_MOST  # further text can change the last ones
        if tokens > limit:
            raise ContextLengthExceeded(field, tokens, limit, at_least=True)

    def _tokenize(
        self, text: str, field: str, add_special_tokens: bool
    ) -> tuple[tuple[int, ...], Sequence[tuple[int, int]]]:
        """Returns the ids of a text, and where each begins and ends in it; nothing of that from a slow tokenizer."""
        _require_unicode(text, field)
        if self._may_be_slow or len(text) * self._expansion > _MAX_NORMALIZED:
            try:
                ids, offsets = self._tokenizing.run("encode", text=text, add_special_tokens=add_special_tokens)
            except JobRefused as error:
                raise _as_failure(error, field) from None
            except GenerationFailed as error:
                raise GenerationFailed(f"{field}: the model's tokenizer {error.message}") from None
            return tuple(ids), offsets
        fast = self._tokenizer.is_fast
        try:
            encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=fast)
        except BaseException as error:
            raise _as_failure(error, field) from None
        return tuple(map(int, encoded["input_ids"])), encoded["offset_mapping"] if fast else ()

    def _rendered(self, prompt: ChatPrompt) -> str:
        """Returns the text of a conversation, which the chat template makes."""
        arguments: dict[str, Any] = {
            "tools": [dict(tool) for tool in prompt.tools] if prompt.tools is not None else None,
            "add_generation_prompt": prompt.begins_answer,
            "continue_final_message": prompt.continues,
        }
        messages = [dict(message) for message in prompt.messages]
        own = type(self._tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        try:
            if own:  # the code of the tokenizer's class, which is trusted
                text = self._tokenizer.apply_chat_template(
                    messages, tokenize=False, **arguments, **prompt.template_kwargs
                )
                return str(text)
            return str(
                PROCESS.templates.run(
                    "render",
                    conversations=[[{k: v for k, v in message.items() if v is not None} for message in messages]],
                    chat_template=self._tokenizer.get_chat_template(None, arguments["tools"]),
                    **arguments,
                    **{**self._tokenizer.special_tokens_map, **prompt.template_kwargs},
                )
            )
        except GenerationFailed as error:
            raise GenerationFailed(f"{prompt.field}: the model's chat template {error.message}") from None
        except NotServing:
            raise
        except Exception as error:  # a template is a program that runs on the client's data, and can raise any error
            raise InvalidInput(prompt.field, f"the chat template refused them: {_reason(error)}") from error


def _as_failure(error: BaseException, field: str) -> BaseException:
    """Returns the error to raise for one of a tokenizer: a panic of its library, which is no Exception, is logged."""
    if isinstance(error, KeyboardInterrupt | SystemExit) or (
        isinstance(error, Exception) and not isinstance(error, JobRefused)
    ):
        return error
    logger.error("the model's tokenizer failed: %s", _reason(error))
    return GenerationFailed(f"{field}: the model's tokenizer failed on this text")


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


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
