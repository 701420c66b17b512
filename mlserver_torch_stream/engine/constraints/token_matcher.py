"""Follows a constraint through the tokens of one sequence, and says which tokens may come next.

Knows nothing of logits, nor of how the constraint was written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

import numpy as np

from mlserver_torch_stream.errors import GenerationFailed

if TYPE_CHECKING:
    from llguidance import LLMatcher

TokenMask = np.ndarray[Any, np.dtype[np.uint8]]
"""One bit for each token, the lowest bit of a byte first; 1 if the token may come next."""


_MOST_REASON = 200  # characters


class TokenMatcher:
    """What the constraint allows after the tokens that were accepted. All its methods run on the engine's thread.

    ``complete``: nothing can follow, so that the sequence ends. ``forced`` are the tokens that must come next, one
    after the other; empty where there is a choice.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        forced: Sequence[int],
        vocab_size: int,
        eos_ids: Collection[int],
        end_ids: Collection[int],
        workers: Executor,
    ) -> None:
        """``eos_ids``: the end tokens of the matcher's tokenizer. ``end_ids``: the tokens that end this sequence."""
        self._matcher = matcher
        self._bytes = (vocab_size + 31) // 32 * 4
        self._eos_ids = [token_id for token_id in eos_ids if token_id not in end_ids]
        self._end_ids = frozenset(token_id for token_id in end_ids if token_id < vocab_size)
        self._workers = workers
        self._mask: Future[TokenMask] | None = None
        self.complete = False
        self.forced = forced

    def accept(self, token_id: int) -> None:
        """Follows a token that was chosen. Raises GenerationFailed if the constraint became too complex to follow."""
        self._settle()
        self._mask = None
        if token_id in self._end_ids:
            return
        self._matcher.consume_token(token_id)
        self._check()
        self.complete = self._matcher.is_stopped()
        self.forced = self.forced[1:] if self.forced[:1] == [token_id] else []
        if not self.forced and not self.complete:
            self.forced = self._matcher.compute_ff_tokens()

    def prefix(self, drafts: Sequence[int]) -> Sequence[int]:
        """Returns the drafts up to the first one that the constraint does not allow."""
        self._settle()
        return drafts[: self._matcher.validate_tokens(list(drafts))]

    def start_mask(self) -> None:
        """Begins to compute the mask of the next token on another thread, unless it is forced."""
        if self._mask is None and not self.forced:
            self._mask = self._workers.submit(self._compute_mask)

    def mask(self) -> TokenMask:
        """Returns which tokens may come next. Raises GenerationFailed if that is too complex to compute."""
        self.start_mask()
        return self._compute_mask() if self._mask is None else self._mask.result()

    def _settle(self) -> None:
        """Waits until no other thread uses the matcher."""
        if self._mask is not None:
            self._mask.exception()

    def _compute_mask(self) -> TokenMask:
        mask = np.zeros(self._bytes, dtype=np.uint8)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        if self._matcher.is_accepting():
            for token_id in self._eos_ids:
                mask[token_id // 8] &= ~np.uint8(1 << token_id % 8)
            for token_id in self._end_ids:
                mask[token_id // 8] |= np.uint8(1 << token_id % 8)
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            why = self._matcher.get_error().partition("\n")[0][:_MOST_REASON]
            raise GenerationFailed(f"the answer cannot be kept to its constraint: {why}")
