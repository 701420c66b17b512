"""Caches the keys and values of prompts, so that the same prefix of a later prompt is copied instead of prefilled.

Knows nothing of requests or batches; an entry is never changed, only copied from.
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

# A shorter prefix is prefilled faster than it is found and copied; chat templates share about as much.
_LEAST = 16
# Entries; each is compared with every new prompt, which takes some 3 us.
_MOST = 512


class PrefixCache:
    """Holds caches of single sequences by their token ids, and evicts the least recently used for newer ones.

    The bytes and the number of entries are bounded.
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
        """Returns a cache with the longest known prefix of ``prompt``, which the caller extends, and its length.

        It leaves out at least one id, for the logits at the end.
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
        """Adds a row of ``cache``, if it can be cut to a prefix. A lack of memory only leads to a warning."""
        if not (self.wanted and cache.is_whole(row)):
            return
        try:
            self.keep(ids, take)
        except RuntimeError as error:
            logger.warning("a prompt could not be cached: %s", error)

    def keep(self, ids: Sequence[int], take: Callable[[], RowCache]) -> None:
        """Adds the cache that ``take`` returns: of exactly these ids (``RowCache.is_whole``), and no longer written to.

        It calls ``take`` when there is room, and only if the ids are new.
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
        """Whether these ids are a prefix of an entry. Drops the entries that are a prefix of these ids."""
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
    """Counts the ids of the common prefix of two sequences."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length
