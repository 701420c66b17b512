"""What a client keeps of one answer during a run: the raw bytes and the times of their arrival.

The bytes are parsed after the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Recording:
    """``started`` is when the client began, before it connected; times are ``time.perf_counter``'s."""

    started: float = 0.0
    ended: float = 0.0
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    on_change: Callable[[], None] | None = None  # for a run that waits until streams have begun

    def add(self, at: float, chunk: bytes) -> None:
        self.chunks.append((at, chunk))
        if self.on_change is not None:
            self.on_change()

    def end(self, at: float) -> None:
        self.ended = at
        if self.on_change is not None:
            self.on_change()


def when_all_stream(recordings: Sequence[Recording], chunks: int) -> asyncio.Future[None]:
    """Done as soon as every recording has this many chunks, or is over."""
    reached = asyncio.get_running_loop().create_future()
    waiting = set(range(len(recordings)))

    def watch(index: int) -> Callable[[], None]:
        def look() -> None:
            if recordings[index].ended or len(recordings[index].chunks) >= chunks:
                recordings[index].on_change = None
                waiting.discard(index)
                if not waiting and not reached.done():
                    reached.set_result(None)

        return look

    for index, recording in enumerate(recordings):
        recording.on_change = watch(index)
    return reached
