"""Polls a store for new objects: those with keys after a cursor, which is stored with the results.

Knows nothing of what is done with the objects. Keys have to grow, as times and counters do: a key before the cursor is
not seen, and neither is a new version of a key that was seen. A queue reports both.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.cloud_errors import RunRefused
from mlserver_torch_stream.cloud.store import Store, get_or_none
from mlserver_torch_stream.cloud.watching import Announced

CURSOR = "cursor.json"
_MOST_OPEN = 10_000


class Poller:
    """``every``: seconds between two polls. ``check`` runs before each poll and ends the polling with a CloudError. The
    cursor is the last key that is done and before which all keys are done."""

    def __init__(
        self,
        store: Store,
        output: Store,
        pattern: re.Pattern[str],
        every: float,
        retry: Retry,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._output = output
        self._pattern = pattern
        self._every = every
        self._retry = retry
        self._check = check
        self._open: dict[str, bool] = {}  # announced key -> whether it is done, in the order of the keys
        self._cursor: str | None = None
        self._saved: str | None = None

    async def announcements(self) -> AsyncGenerator[Announced, None]:
        """Never ends by itself. Raises CloudError."""
        self._cursor = self._saved = await self._load()
        while True:
            self._check()
            for key in await self._retry.run(self._new):
                self._open[key] = False
                yield Announced(key, lambda key=key: self._done(key))  # type: ignore[misc]
            await self.save()
            await asyncio.sleep(self._every)

    async def save(self) -> None:
        if self._cursor != self._saved:
            cursor = self._cursor
            await self._retry.run(self._output.put, CURSOR, json.dumps({"after": cursor}).encode() + b"\n")
            self._saved = cursor

    async def _new(self) -> list[str]:
        """The first new keys, at most as many as may be open; the next poll finds the rest."""
        keys: list[str] = []
        most = _MOST_OPEN - len(self._open)
        async for info in self._store.list(self._cursor):
            if self._pattern.fullmatch(info.key) and info.key not in self._open:
                keys.append(info.key)
            if len(keys) > 2 * most:  # a folder is not listed in order, so the first key may be last
                keys = sorted(keys)[:most]
        return sorted(keys)[:most]

    async def _done(self, key: str) -> None:
        self._open[key] = True
        while self._open and self._open[first := next(iter(self._open))]:
            del self._open[first]
            self._cursor = max(self._cursor or "", first)

    async def _load(self) -> str | None:
        found = await get_or_none(self._output, CURSOR, self._retry)
        try:
            return None if found is None else str(json.loads(found)["after"])
        except (ValueError, KeyError, TypeError):
            raise RunRefused(f"--output: its {CURSOR} was not written by this program") from None
