"""Compiles the constraints of requests for the vocabulary of a model's tokenizer.

Compiling can take seconds, so it runs in other threads. If llguidance got a ``tokenizer.json``, it would create a
second tokenizer, which takes 17 MB for 49,000 tokens. Here llguidance calls the model's tokenizer instead.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from fractions import Fraction
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from mlserver_torch_stream.engine.constraints.compile_threads import Compilation, CompileThreads, finish, threads_for
from mlserver_torch_stream.engine.constraints.token_bytes import TokenBytes
from mlserver_torch_stream.engine.constraints.token_matcher import CompiledConstraint, TokenMask, mask_bytes
from mlserver_torch_stream.engine.machine import read_host
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.types import Constraint, ReasoningMarks

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class TokenVocabulary:
    """The tokenizer that ``llguidance.TokenizerWrapper`` calls. Several threads may call it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, token_bytes: TokenBytes) -> None:
        self._backend = tokenizer.backend_tokenizer
        size = self._backend.get_vocab_size(with_added_tokens=True)
        self.tokens: Sequence[bytes] = [token_bytes.of(token_id) for token_id in range(size)]
        added = tokenizer.added_tokens_decoder.items()
        self.special_token_ids = [token_id for token_id, token in added if _is_special(token)]
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids


def _is_special(token: Any) -> bool:
    """Returns whether llguidance must keep a token out of text.

    This includes tokens such as ``</think>`` that are not marked as special.
    """
    content = str(token.content)
    return bool(token.special) or (content.startswith("<") and content.endswith(">"))


def read_vocabulary(tokenizer: PreTrainedTokenizerBase) -> LLTokenizer:
    """Reads a fast tokenizer that neither pads nor truncates.

    Raises ValueError for a kind of tokenizer that llguidance does not know. If the tokenizer has a normalizer,
    llguidance makes its own copy of the tokenizer, without normalizers that add text.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    token_bytes = TokenBytes(tokenizer)
    normalizes = tokenizer.backend_tokenizer.normalizer is not None
    if not token_bytes.byte_level or normalizes or tokenizer.eos_token_id is None:
        return LLTokenizer(tokenizer.backend_tokenizer.to_str(), eos_token=tokenizer.eos_token_id)
    vocabulary = TokenVocabulary(tokenizer, token_bytes)
    wrapper = TokenizerWrapper(vocabulary)
    read = LLTokenizer(wrapper, eos_token=tokenizer.eos_token_id)
    wrapper.tokens = vocabulary.tokens = ()  # llguidance has copied them
    return read


logger = logging.getLogger(__name__)

_INSTALL = "needs llguidance: pip install 'mlserver-torch-stream[structured]'"
_KEPT = 32  # the number of compiled constraints that are kept
_MAX_CHARACTERS = 2**17  # the maximum length of a constraint's source, which can take seconds to compile
# A matcher holds 1 to 2 kB for each state of its lexer, so about 40 MB at most. A schema of 100 fields has about a
# hundred states.
_MAX_LEXER_STATES = 20_000
_MAX_GRAMMAR = 100_000  # symbols
_MULTIPLE_OF = re.compile(r'"multipleOf":\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?)(?![0-9])')
_MAX_MULTIPLE = 10_000  # takes some 0.1 s; 100,000 takes seconds
_MAX_REASON = 300  # characters

_Key = tuple[Constraint, ReasoningMarks | None]


class ConstraintCompiler:
    """Compiles constraints for one tokenizer. Several threads may call its methods."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._prepared: LLTokenizer | str | None = None  # a str: why this tokenizer has no structured output
        self._preparing = Lock()
        self._kept: OrderedDict[_Key, CompiledConstraint] = OrderedDict()
        self._compiling: dict[_Key, Future[CompiledConstraint]] = {}
        self._lock = Lock()  # guards ``_kept`` and ``_compiling``
        self._threads: CompileThreads[CompiledConstraint] = CompileThreads(threads_for(read_host().threads))

    def prepare(self) -> LLTokenizer | str:
        """Reads the vocabulary. This blocks all threads for 0.3 to 1 s, so it is done when a model is loaded.

        If structured output is not possible with this tokenizer, returns the reason as a str.
        """
        with self._preparing:
            if self._prepared is None:
                self._prepared = _prepared(self._tokenizer)
            return self._prepared

    def submit(
        self, constraint: Constraint, reasoning: ReasoningMarks | None = None
    ) -> Compilation[CompiledConstraint]:
        """Starts compiling an answer's constraint. Reasoning between the marks ``reasoning`` may precede the answer.

        The future may raise InvalidInput, which names the constraint's field.
        """
        key = (constraint, reasoning)
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
        if kept is None:
            return self._threads.submit(lambda: self._compiled_once(key))
        known: Compilation[CompiledConstraint] = Compilation()
        known.begun.set_result(None)
        known.set_result(kept)
        return known

    def _compiled_once(self, key: _Key) -> CompiledConstraint:
        """Compiles a constraint, or waits for the thread that is already compiling it."""
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                return kept
            is_first = key not in self._compiling
            compiling = self._compiling.setdefault(key, Future())
        if is_first:
            finish(compiling, lambda: self._compile(*key))
            with self._lock:
                del self._compiling[key]
                if compiling.exception() is None:
                    self._kept[key] = compiling.result()
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        return compiling.result()

    def _compile(self, constraint: Constraint, reasoning: ReasoningMarks | None) -> CompiledConstraint:
        tokenizer = self.prepare()
        if isinstance(tokenizer, str):
            raise InvalidInput(constraint.field, tokenizer)
        if len(constraint.source) > _MAX_CHARACTERS:
            raise InvalidInput(constraint.field, f"must have at most {_MAX_CHARACTERS} characters")
        if _least_multiple(constraint.source) > _MAX_MULTIPLE:
            multiple = "the least common multiple of all multipleOf, without decimal points and the factors 2 and 5,"
            raise InvalidInput(constraint.field, f"is too complex: {multiple} is above {_MAX_MULTIPLE}")
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, max_grammar_size=_MAX_GRAMMAR, verbose_errors=False)
        try:
            grammar = self._grammar(constraint, reasoning, tokenizer)
        except ValueError as error:
            raise InvalidInput(constraint.field, _reason(str(error))) from None
        # Takes up to seconds, and releases the interpreter's lock.
        start = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        # Most constraints that are too complex fail when the library computes their first mask.
        first_mask = _checked_mask(start, tokenizer.vocab_size, constraint.field)
        if forced := start.compute_ff_tokens():
            after_forced = start.deep_copy()
            after_forced.consume_tokens(forced)
            first_mask = _checked_mask(after_forced, tokenizer.vocab_size, constraint.field)
        eos_ids = tuple(tokenizer.eos_tokens)
        size, field = tokenizer.vocab_size, constraint.field
        return CompiledConstraint(start, tuple(forced), size, first_mask, eos_ids, field, grammar)

    def _grammar(self, constraint: Constraint, reasoning: ReasoningMarks | None, tokenizer: LLTokenizer) -> str:
        from mlserver_torch_stream.engine.constraints.grammar import after_reasoning, grammar_of

        grammars = [grammar_of(constraint)]
        if reasoning is not None:
            end = self._pieces(reasoning.end, tokenizer)
            end_id = end[0] if isinstance(end[0], int) and len(end) == 1 else None
            begin = None if reasoning.begin is None else self._pieces(reasoning.begin, tokenizer)
            grammars = after_reasoning(grammars[0], reasoning.end, end_id, begin)
        return json.dumps({"grammars": grammars})

    def _pieces(self, text: str, tokenizer: LLTokenizer) -> list[str | int]:
        """Returns the text as a list of pieces, in which each special token is replaced by its id."""
        pieces: list[str | int] = []
        for token_id in self._tokenizer(text, add_special_tokens=False)["input_ids"]:
            if tokenizer.is_special_token(token_id):
                before, _, text = text.partition(str(self._tokenizer.convert_ids_to_tokens(token_id)))
                pieces += [before, token_id]
        return [piece for piece in (*pieces, text) if piece != ""]


def _prepared(tokenizer: PreTrainedTokenizerBase) -> LLTokenizer | str:
    if find_spec("llguidance") is None:
        return _INSTALL
    if not tokenizer.is_fast:
        return "is not possible with this model, whose tokenizer is not a fast one"
    backend = tokenizer.backend_tokenizer
    backend.no_padding()  # as transformers does at the tokenizer's first use
    backend.no_truncation()
    if max(tokenizer.get_vocab().values()) >= backend.get_vocab_size(with_added_tokens=True):
        return "is not possible with this model, whose token ids have gaps"
    try:
        return read_vocabulary(tokenizer)
    except Exception as error:
        logger.info("no structured output with this tokenizer: %s", error)
        return f"is not possible with this model, whose tokenizer is of an unknown kind ({_reason(str(error))})"


def _checked_mask(matcher: LLMatcher, vocab_size: int, field: str) -> TokenMask:
    """Returns the tokens that may come next. Raises InvalidInput if there is none or the constraint is too complex."""
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidInput(field, _reason(matcher.get_error()))
    return np.frombuffer(mask, dtype=np.uint8, count=mask_bytes(vocab_size))


def _least_multiple(source: str) -> int:
    """Returns the least common multiple of all numbers after ``multipleOf``, without their factors 2 and 5.

    The library's time and memory grow with this number.
    """
    least = 1
    for text in dict.fromkeys(_MULTIPLE_OF.findall(source)):
        number = abs(Fraction(text).numerator) or 1
        for factor in (2, 5):
            while number % factor == 0:
                number //= factor
        least = math.lcm(least, number)
        if least > _MAX_MULTIPLE:
            break
    return least


def _reason(text: str) -> str:
    if text.startswith("NoExtension"):
        return "no answer matches it"
    return " ".join(text.removesuffix("<non-verbose/>").split())[:_MAX_REASON]
