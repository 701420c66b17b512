"""Prompts whose keys and values are kept, so that a later prompt that begins alike is not prefilled twice.

Knows nothing of requests or batches; what is kept is never changed, only copied from.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mlserver_torch_stream.engine.kv_cache.bytes_per_token import CacheCost
from mlserver_torch_stream.engine.kv_cache.row_cache import RowCache

logger = logging.getLogger(__name__)

Ids = NDArray[np.int64]

# A shorter beginning is prefilled faster than it is looked for and copied; chat templates share about that much.
_LEAST = 16
# Each is compared with every new prompt, which takes some 3 us.
_MOST = 512


class PrefixCache:
    """Caches of single rows by their token ids, the least recently used of them given up for newer ones.

    Bounded by bytes and in number.
    """

    def __init__(self, max_bytes: int, cost: CacheCost) -> None:
        self._max_bytes = max_bytes
        self._cost = cost
        self._kept: OrderedDict[int, tuple[Ids, RowCache]] = OrderedDict()
        self._next = 0
        self.bytes = 0

    @property
    def wanted(self) -> bool:
        return self._max_bytes > 0

    def begin(self, prompt: Sequence[int]) -> tuple[RowCache, int] | None:
        """A cache that begins as ``prompt`` does, for the caller to fill on, and how many of its ids are in it.

        At least one id is left out, for the logits at the end.
        """
        ids = np.asarray(prompt, dtype=np.int64)
        best, shared = None, _LEAST - 1
        for key, (kept, _) in self._kept.items():
            length = min(_common(kept, ids), len(ids) - 1)
            if length > shared:
                best, shared = key, length
        if best is None:
            return None
        self._kept.move_to_end(best)
        return self._kept[best][1].head(shared, len(ids)), shared

    def offer(self, ids: Sequence[int], cache: RowCache, row: int, take: Callable[[], RowCache]) -> None:
        """Keeps what a row of ``cache`` holds, if it can be cut to a prefix; without memory for it nobody is hurt."""
        if not (self.wanted and cache.is_whole(row)):
            return
        try:
            self.keep(ids, take)
        except RuntimeError as error:
            logger.warning("a prompt could not be kept: %s", error)

    def keep(self, ids: Sequence[int], take: Callable[[], RowCache]) -> None:
        """Keeps what ``take`` returns: a cache of exactly these ids (``RowCache.is_whole``) that nobody writes to.

        Called when there is room, and only if there is anything new in it.
        """
        held = np.asarray(ids, dtype=np.int64)
        size = self._cost.of(1, len(held))
        if len(held) < _LEAST or size > self._max_bytes or self._holds(held):
            return
        while self.bytes + size > self._max_bytes or len(self._kept) >= _MOST:
            self._drop(next(iter(self._kept)))
        self._kept[self._next] = (held, take())
        self._next += 1
        self.bytes += size

    def _holds(self, ids: Ids) -> bool:
        """Whether these ids are the beginning of a kept prompt; drops those that are a beginning of them."""
        for key, (kept, _) in list(self._kept.items()):
            shared = _common(kept, ids)
            if shared == len(ids):
                self._kept.move_to_end(key)
                return True
            if shared == len(kept):
                self._drop(key)
        return False

    def _drop(self, key: int) -> None:
        kept, _ = self._kept.pop(key)
        self.bytes -= self._cost.of(1, len(kept))


def _common(one: Ids, other: Ids) -> int:
    """How many ids two sequences have in common at their beginnings."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length
