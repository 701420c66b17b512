"""Matches the tokens of a sequence with the sequence's compiled constraint, and says which tokens may come next."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from mlserver_torch_stream.errors import ConstraintTooComplex

if TYPE_CHECKING:
    from llguidance import LLMatcher


TokenMask = np.ndarray[Any, np.dtype[np.uint8]]
"""One bit for each token, the lowest bit of a byte first; 1 if the token may come next."""

_MAX_REASON = 200  # characters


def mask_bytes(vocab_size: int) -> int:
    """Returns the length of a mask in bytes, a multiple of 4. The library's ``compute_bitmask`` may return more."""
    return (vocab_size + 31) // 32 * 4


class TokenMatcher:
    """Says which tokens the constraint allows next. All methods run on the engine's thread.

    ``forced`` has the tokens that must come next, in order; it is empty if there is a choice. The library's matcher has
    already consumed these tokens, so that the mask for the next free choice can be computed before they are accepted. A
    token that the model does not know is never forced, nor is any token after it; the mask then allows only that token,
    so that none can be chosen.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        forced: Iterable[int],
        first_mask: TokenMask,
        vocab_size: int,
        eos_ids: Collection[int],
        end_ids: Collection[int],
        field: str,
    ) -> None:
        """``forced`` are the tokens with which each answer begins; ``first_mask`` says which tokens may follow them.

        The model knows the tokens below ``vocab_size``. ``eos_ids`` are the tokenizer's end tokens; ``end_ids`` are
        the tokens that end this sequence. ``field`` is the request parameter that set the constraint.
        """
        self._matcher = matcher
        self._field = field
        self._bytes = len(first_mask)
        self._eos_ids = [token_id for token_id in eos_ids if token_id not in end_ids]
        self._end_ids = frozenset(token_id for token_id in end_ids if token_id < vocab_size)
        self._mask: TokenMask | None = first_mask
        self._computing: Future[None] | None = None
        self._vocab_size = vocab_size
        self._stopped = matcher.is_stopped()
        self.forced: deque[int] = deque()
        self._force(list(forced))

    @property
    def complete(self) -> bool:
        """True if no token can follow, so that the sequence ends."""
        return self._stopped and not self.forced

    def accept(self, token_id: int) -> None:
        """Adds the chosen token. Raises ConstraintTooComplex if the constraint becomes too complex."""
        if self.forced:
            forced = self.forced.popleft()
            assert token_id == forced, "a token other than the forced one was chosen"
        elif token_id not in self._end_ids:
            self._follow(token_id)

    def _follow(self, token_id: int) -> None:
        self._settle()
        self._mask = None
        self._consume([token_id])
        if not self._stopped:
            self._force(self._matcher.compute_ff_tokens())

    def _force(self, token_ids: Sequence[int]) -> None:
        known = list(takewhile(lambda token_id: token_id < self._vocab_size, token_ids))
        if len(known) < len(token_ids):
            self._mask = None  # it would be for the place after the unknown token
        if known:
            self.forced.extend(known)
            self._consume(known)

    def prefix(self, drafts: Sequence[int]) -> Sequence[int]:
        """Returns the drafts before the first draft that the constraint does not allow."""
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, self.forced, strict=False)))
        if right < len(self.forced):
            return drafts[:right]
        self._settle()
        return drafts[: right + self._matcher.validate_tokens(list(drafts[right:]))]

    def mask(self) -> TokenMask:
        """Returns the tokens that may come next. Raises ConstraintTooComplex if the computation is too complex."""
        mask: TokenMask
        if self.forced:
            mask = np.zeros(self._bytes, dtype=np.uint8)
            _allow(mask, self.forced[0])
            return mask
        self._settle()
        if self._mask is None:
            self._compute()
        self._check()
        assert self._mask is not None
        if not self._matcher.is_accepting():
            return self._mask
        mask = self._mask.copy()
        for token_id in self._eos_ids:
            mask[token_id // 8] &= ~np.uint8(1 << token_id % 8)
        for token_id in self._end_ids:
            _allow(mask, token_id)
        return mask

    @property
    def _lacks_mask(self) -> bool:
        return self._mask is None and self._computing is None and not self._stopped

    def _settle(self) -> None:
        """Waits until no other thread uses the matcher.

        An error in that thread is ignored here: it will occur again when ``mask`` computes the mask.
        """
        if self._computing is not None:
            self._computing.exception()
            self._computing = None

    def _compute(self) -> None:
        mask = np.zeros(self._bytes, dtype=np.uint8)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._mask = mask

    def _consume(self, token_ids: list[int]) -> None:
        self._matcher.consume_tokens(token_ids)
        self._check()
        self._stopped = self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            why = self._matcher.get_error().partition("\n")[0][:_MAX_REASON]
            raise ConstraintTooComplex(self._field, why)

    @staticmethod
    def start_masks(matchers: Sequence[TokenMatcher], worker: Executor) -> None:
        """Starts computing, in another thread, the masks of the tokens after the forced ones."""
        lacking = [matcher for matcher in matchers if matcher._lacks_mask]
        if lacking:
            computing = worker.submit(_compute_all, lacking)
            for matcher in lacking:
                matcher._computing = computing


def _compute_all(matchers: Sequence[TokenMatcher]) -> None:
    for matcher in matchers:
        matcher._compute()


def _allow(mask: TokenMask, token_id: int) -> None:
    mask[token_id // 8] |= np.uint8(1 << token_id % 8)


@dataclass(frozen=True, eq=False, slots=True)
class CompiledConstraint:
    """A constraint that is compiled for one tokenizer.

    ``start`` is the library's matcher before the first token; only copies of it consume tokens.

    Each answer begins with the tokens ``forced``, and ``first_mask`` says which tokens may follow. ``vocab_size`` and
    ``eos_ids`` are the tokenizer's. ``field`` is the request parameter that set the constraint. ``grammar`` is the
    constraint in llguidance's JSON format.
    """

    start: LLMatcher
    forced: Sequence[int]
    vocab_size: int
    first_mask: TokenMask
    eos_ids: tuple[int, ...]
    field: str
    grammar: str = ""

    def matcher(self, end_ids: Collection[int], vocab_size: int) -> TokenMatcher:
        """Returns the matcher of a sequence of a model that knows the tokens below ``vocab_size``.

        A token of ``end_ids`` may end the sequence once the constraint is met.
        """
        size = min(vocab_size, self.vocab_size)
        start = self.start.deep_copy()
        return TokenMatcher(start, self.forced, self.first_mask, size, self.eos_ids, end_ids, self.field)
