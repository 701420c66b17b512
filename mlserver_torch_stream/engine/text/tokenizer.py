"""Converts prompts of every kind to token ids, and token ids to text. Applies the chat template.

Token ids are converted to text one by one, each in constant time. Characters are never split, and no id raises an
error.
"""

from __future__ import annotations

import codecs
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
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
from mlserver_torch_stream.engine.text.answer_writer import Detokenizer
from mlserver_torch_stream.engine.text.chat_format import AUTO, ChatFormat
from mlserver_torch_stream.engine.text.text_process import JobRefused, TextProcesses
from mlserver_torch_stream.engine.text.tokenizer_limits import expansion, may_be_slow
from mlserver_torch_stream.errors import ContextLengthExceeded, GenerationFailed, InvalidInput, NotServing
from mlserver_torch_stream.types import ChatPrompt, Constraint, Prompt, ReasoningMarks, TextPrompt, TokensPrompt

logger = logging.getLogger(__name__)

_MAX_NORMALIZED = 2**26  # characters that this process tokenizes at a time, which takes up to 140 bytes for each
_MAX_THREADS = 2
_CHARACTERS_PER_TOKEN = 8  # more than any language has on average
_MAY_SHRINK = 4  # how many times shorter a normalizer may make a text
_LONG = 2**18  # characters: tokenizing them leaves some 30 MB of free blocks in the heap
_TRIM_AFTER_S = 1.0
_UNSURE = 64  # tokens at the end of an unfinished text, which further text can still change
_ENDING = 16  # tokens at the end of a conversation in which the reasoning may begin


class TextCodec:
    """A tokenizer and its chat template.

    A ``ChatPrompt`` must have at least one message, and the content of each message must be one string.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tool_parser: str = AUTO, reasoning_parser: str = AUTO
    ) -> None:
        """``tool_parser`` and ``reasoning_parser`` are the settings' values.

        Raises LoadFailed if the tokenizer can make a text longer by a large factor.
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
        """The threads that encode long prompts and prompts for which ``blocks`` is True, a few at a time."""

    def limit_prompts(self, max_tokens: int) -> None:
        """From now on, a text of more than ``max_tokens`` tokens is refused before the whole text is tokenized."""
        longest, _ = self._vocabulary
        shrinks = not self._tokenizer.is_fast or self._tokenizer.backend_tokenizer.normalizer is not None
        self._max_characters = max_tokens * longest * (_MAY_SHRINK if shrinks else 1)
        self._max_tokens = max_tokens

    def blocks(self, prompt: Prompt) -> bool:
        """Returns whether encoding this prompt has to wait for another process; the event loop must not wait."""
        return isinstance(prompt, ChatPrompt) or (self._may_be_slow and isinstance(prompt, TextPrompt))

    @cached_property
    def _vocabulary(self) -> tuple[int, int]:
        """The number of characters of the longest token, and the highest id. It takes 0.2 s to read 256,000 tokens."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return max(map(len, vocabulary), default=1), max(vocabulary.values(), default=-1)

    @property
    def vocab_size(self) -> int:
        """The highest id plus 1, added tokens included.

        This exceeds the number of tokens if some ids are unused.
        """
        return self._vocabulary[1] + 1

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template, so that a prompt can consist of messages."""
        return bool(self._tokenizer.chat_template)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that ``decode`` leaves out if ``skip_special_tokens`` is true."""
        added = self._tokenizer.added_tokens_decoder
        special = {token_id for token_id, token in added.items() if token.special}
        return frozenset(special | set(self._tokenizer.all_special_ids))

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Returns the prompt's ids.

        Raises InvalidInput if the prompt is too long or the chat template refuses it. Raises GenerationFailed if the
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
        """Returns the text of ``ids``, without cleaning up the spaces between tokens."""
        try:
            text = self._tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        except BaseException as error:
            raise _as_failure(error, "these tokens") from None
        return str(text)

    def detokenizer(self, skip_special_tokens: bool, marks: frozenset[int] = frozenset()) -> Detokenizer:
        """Returns the detokenizer of one sequence. Special tokens in ``marks`` are never skipped."""
        silent = self.special_ids - marks if skip_special_tokens else frozenset[int]()
        if self._token_bytes.join_to_text:
            return ByteDetokenizer(self.token_bytes, silent)
        return WindowDetokenizer(partial(self.decode, skip_special_tokens=skip_special_tokens and not marks), silent)

    def answer_format(self, prompt: ChatPrompt, ids: Sequence[int], constraint: Constraint | None) -> AnswerFormat:
        """Returns how the answer to the conversation with these ids is divided.

        The answer's text must match ``constraint``. Raises InvalidInput if calls cannot be combined with the
        constraint.
        """
        return self.chat_format.answer(prompt, self.decode(ids[-_ENDING:], skip_special_tokens=False), constraint)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token; for a special token, the bytes of its name."""
        return self._token_bytes.of(token_id)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Returns the tokens as they are written in the vocabulary."""
        return [str(token) for token in self._tokenizer.convert_ids_to_tokens(list(ids))]

    def bad_words_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """For each word, returns its ids at the start of a text and its ids after a space."""
        spellings = [spelling for word in words if word.strip() for spelling in (word, " " + word.lstrip())]
        encoded = [self._plain(spelling, "bad_words") for spelling in spellings]
        return tuple(dict.fromkeys(ids for ids in encoded if ids))

    def prepare(self) -> None:
        """Reads the vocabulary at load, so that the first constrained request and those beside it need not wait."""
        _ = self._vocabulary
        self._constraints.prepare()

    def submit(
        self, constraint: Constraint, reasoning: ReasoningMarks | None = None
    ) -> Compilation[CompiledConstraint]:
        """Starts compiling a constraint for an answer.

        Reasoning between the marks ``reasoning`` may precede the answer. The compilation may raise InvalidInput.
        """
        return self._constraints.submit(constraint, reasoning)

    def _adds_special_tokens(self, text: str) -> bool:
        """Returns whether special tokens are added to a raw prompt; they are not added if it begins with BOS."""
        bos = self._tokenizer.bos_token
        return not (bos and text.startswith(str(bos)))

    def _plain(self, text: str, field: str) -> tuple[int, ...]:
        """Returns the ids of the text; no special tokens are added."""
        return self._tokenize(text, field, False)

    def _ids(self, text: str, field: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Returns the ids of a whole prompt. After a long prompt, freed memory is returned to the system."""
        try:
            self.check_length(text, field)
            return self._tokenize(text, field, add_special_tokens)
        finally:
            if len(text) > _LONG:  # once the body of its request is freed too
                later = threading.Timer(_TRIM_AFTER_S, trim_heap)
                later.daemon = True
                later.start()

    def check_length(self, text: str, field: str) -> None:
        """Raises ContextLengthExceeded if the text has too many characters or its first part has too many tokens.

        The text may be only the beginning of a prompt. At most 8 characters per token of the limit are tokenized.
        """
        limit = self._max_tokens
        if limit is None or len(text) <= limit:
            return
        tokens = -(-len(text) * limit // self._max_characters)
        if tokens <= limit and len(text) > _CHARACTERS_PER_TOKEN * limit:
            beginning = text[: _CHARACTERS_PER_TOKEN * limit]
            tokens = len(self._plain(beginning, field)) - _UNSURE  # further text can change the last tokens
        if tokens > limit:
            raise ContextLengthExceeded(field, tokens, limit, at_least=True)

    def _tokenize(self, text: str, field: str, add_special_tokens: bool) -> tuple[int, ...]:
        _require_unicode(text, field)
        if self._may_be_slow or len(text) * self._expansion > _MAX_NORMALIZED:
            try:
                return tuple(self._tokenizing.run("encode", text=text, add_special_tokens=add_special_tokens))
            except JobRefused as error:
                raise _as_failure(error, field) from None
            except GenerationFailed as error:
                raise GenerationFailed(f"{field}: the model's tokenizer {error.message}") from None
        try:
            ids = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        except BaseException as error:
            raise _as_failure(error, field) from None
        return tuple(map(int, ids))

    def _rendered(self, prompt: ChatPrompt) -> str:
        """Returns the text that the chat template renders for a conversation."""
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
            raise InvalidInput(prompt.field, f"the chat template refused the messages: {_reason(error)}") from error


def _as_failure(error: BaseException, field: str) -> BaseException:
    """Returns the error to raise for a tokenizer's error. Logs a panic of the library, which is not an Exception."""
    if isinstance(error, KeyboardInterrupt | SystemExit) or (
        isinstance(error, Exception) and not isinstance(error, JobRefused)
    ):
        return error
    logger.error("the model's tokenizer failed: %s", _reason(error))
    return GenerationFailed(f"{field}: the model's tokenizer failed")


def _require_unicode(text: str, field: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInput(field, "is not valid Unicode: it contains half of a surrogate pair") from error


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_PENDING_CHARS = 3  # an unfinished character decodes to at most this many replacement characters
_CONTEXT = 4  # tokens kept before new ones: their text determines the space before the next token
_WINDOW = 16  # tokens after which the window is cut back to its context
_STUCK = 32  # tokens after which it is cut although its end is unfinished


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class ByteDetokenizer:
    """Concatenates the bytes of tokens and decodes them as UTF-8, for tokenizers whose only decoder is ByteLevel."""

    def __init__(self, token_bytes: Callable[[int], bytes], silent: frozenset[int]) -> None:
        """``silent`` are tokens that are skipped."""
        self._token_bytes = token_bytes
        self._silent = silent
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(
            b"".join([self._token_bytes(token_id) for token_id in token_ids if token_id not in self._silent])
        )

    def flush(self, *, cut: bool = False) -> str:
        rest = self._decoder.decode(b"", final=True)
        return "" if cut else rest


class WindowDetokenizer:
    """Decodes a short window of recent tokens and returns the new text in it; works with any tokenizer.

    The contract of ``Detokenizer`` has one exception: tokenizers with byte fallback can emit, byte by byte, a run of
    bytes that is not UTF-8 or that encodes the replacement character. If all ids were decoded at once, the entire run
    would be replaced. At this point the complete characters have already been returned, and there may be more or fewer
    replacement characters than in the whole text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], silent: frozenset[int]) -> None:
        """``silent`` are tokens that are skipped and never passed to ``decode``."""
        self._decode = decode
        self._silent = silent
        self._window: list[int] = []
        self._returned = ""  # the text of the window that has been returned
        self._complete = 0  # tokens of the window whose text has been returned entirely
        self._cut = 0  # an earlier such count, where the window may be cut

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push(token_id) for token_id in token_ids if token_id not in self._silent])

    def flush(self, *, cut: bool = False) -> str:
        text = self._decode(self._window)
        if text.startswith(self._returned):
            rest = text[len(self._returned) :]
        else:
            rest = self._decode(self._window[self._complete :])
        self._window, self._returned, self._complete, self._cut = [], "", 0, 0
        return rest.rstrip(_REPLACEMENT) if cut else rest

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.startswith(self._returned):
            return self._restart() if self._broken(text) else ""
        return self._release(text)

    def _release(self, text: str) -> str:
        """Returns the new text of the window that can no longer change."""
        unfinished = min(len(text) - len(text.rstrip(_REPLACEMENT)), _PENDING_CHARS)
        certain = max(len(text) - unfinished, len(self._returned))
        new = text[len(self._returned) : certain]
        self._returned = text[:certain]
        if certain == len(text):
            self._mark_complete()
        elif len(self._window) >= _STUCK:
            self._trim(len(self._window) - 2 * _CONTEXT, unfinished)
        return new

    def _mark_complete(self) -> None:
        self._complete = len(self._window)
        if self._complete >= _WINDOW and self._cut:
            self._trim(self._cut, 0)
        elif self._complete >= _WINDOW - _CONTEXT and not self._cut:
            self._cut = self._complete

    def _trim(self, start: int, unfinished: int) -> None:
        """Drops the tokens before ``start``. The text's last ``unfinished`` characters have not been returned yet."""
        text = self._decode(self._window[start:])
        if not text and len(self._window) < _STUCK:
            return  # a context without text would not keep the next token's leading space
        self._window = self._window[start:]
        self._returned = text[: len(text) - unfinished]
        self._complete = len(self._window) - unfinished
        self._cut = 0

    def _broken(self, text: str) -> bool:
        """Returns whether the text that was returned differs from the window's by more than an incomplete character."""
        return not text.endswith(_REPLACEMENT) or len(self._window) - self._complete > 2 * _CONTEXT

    def _restart(self) -> str:
        """Starts a new window at the first token that has not been returned entirely."""
        self._window = self._window[self._complete :]
        self._returned, self._complete, self._cut = "", 0, 0
        return self._release(self._decode(self._window))
