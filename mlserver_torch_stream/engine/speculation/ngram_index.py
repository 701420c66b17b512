"""Finds in a sequence of tokens what followed the last time that its newest tokens occurred.

Knows nothing of models. The method is prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence

# Longer n-grams first: what follows them is right more often.
_SIZES = (4, 3, 2)


class NgramIndex:
    """Knows for each n-gram of a sequence the position after its last occurrence before the end of the sequence."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self._tokens)
            for size in _SIZES:
                if end >= size:
                    self._after[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token)

    @property
    def matching(self) -> int:
        """The size of the longest n-gram that ends the sequence and occurred before; 0: there is none."""
        return self._find()[0]

    def lookup(self, most: int) -> list[int]:
        """Returns at most ``most`` tokens that may follow; none if the newest tokens did not occur before."""
        size, position = self._find()
        drafts: list[int] = []
        for index in range(position, position + most) if size else ():  # where the text loops, the drafts loop too
            known = len(self._tokens)
            drafts.append(self._tokens[index] if index < known else drafts[index - known])
        return drafts

    def _find(self) -> tuple[int, int]:
        """Returns ``matching``, and the position after that n-gram's last occurrence before the end; zeros if none."""
        for size in _SIZES:
            newest = tuple(self._tokens[-size:])
            if len(newest) == size and newest in self._after:
                return size, self._after[newest]
        return 0, 0
