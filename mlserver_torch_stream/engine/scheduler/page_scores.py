"""Keeps the scores of the tokens in pages of the prefix cache, so that a shared prefix is scored once.

The score of a token depends only on the tokens before it, so the digest of its page identifies it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from mlserver_torch_stream.types import TokenLogprob

# The most log-probabilities, alternatives included: about 100 bytes each.
_MAX_LOGPROBS = 2**18


class PageScores:
    """The scores of full pages. All scores of a page have the same number of alternatives.

    The least recently used are dropped.
    """

    def __init__(self, max_logprobs: int = _MAX_LOGPROBS) -> None:
        self._max_logprobs = max_logprobs
        self._logprobs = 0
        self._pages: OrderedDict[bytes, tuple[int, Sequence[TokenLogprob]]] = OrderedDict()

    def find(self, digest: bytes, top: int) -> Sequence[TokenLogprob] | None:
        """Returns the scores of a page's tokens with ``top`` alternatives each; None if they are not known."""
        kept, scores = self._pages.get(digest, (-1, ()))
        if kept < top:
            return None
        self._pages.move_to_end(digest)
        return scores if kept == top else [replace(score, top=score.top[:top]) for score in scores]

    def keep(self, digest: bytes, scores: Sequence[TokenLogprob], top: int) -> None:
        """Stores the scores of all tokens of a page, unless they are stored with at least as many alternatives."""
        kept, earlier = self._pages.get(digest, (-1, ()))
        if kept >= top:
            return
        self._logprobs += len(scores) * (1 + top) - len(earlier) * (1 + kept)
        self._pages[digest] = top, tuple(scores)
        self._pages.move_to_end(digest)
        while self._logprobs > self._max_logprobs:
            _, (kept, scores) = self._pages.popitem(last=False)
            self._logprobs -= len(scores) * (1 + kept)
