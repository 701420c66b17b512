"""When to try again: exponential back-off with jitter, bounded in number and in time.

Knows nothing of what is tried.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from mlserver_torch_stream.cloud.cloud_errors import CloudError, StoreUnavailable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retry:
    """``tries`` in all; the n-th pause is up to ``first * 2**n`` seconds, at most ``longest``, at least half of it."""

    tries: int = 6
    first: float = 0.1
    longest: float = 10.0

    def pause(self, failed: int, error: CloudError, draw: float | None = None) -> float:
        """Seconds to wait after the ``failed``-th failure, from 1; ``draw`` in [0, 1) is the jitter."""
        jitter = random.random() if draw is None else draw
        pause: float = min(self.longest, self.first * 2.0 ** (failed - 1)) * (0.5 + jitter / 2)
        asked = error.retry_after if isinstance(error, StoreUnavailable) else None
        return pause if asked is None else min(self.longest, max(pause, asked))

    async def run(self, attempt: Callable[[], Awaitable[T]], again: Callable[[CloudError], None] | None = None) -> T:
        """What ``attempt`` returns at last. Raises its last CloudError; ``again`` is told of each that is retried."""
        failed = 0
        while True:
            try:
                return await attempt()
            except CloudError as error:
                failed += 1
                if not error.retriable or failed >= self.tries:
                    raise
                if again is not None:
                    again(error)
                await asyncio.sleep(self.pause(failed, error))
