"""One line that says how far a run is, and the lines at its end.

Knows counters and a terminal; what is counted is the run's business.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass
from typing import TextIO

from mlserver_torch_stream.cloud.run_metrics import RunMetrics

_EVERY_S = 0.2
_BAR = 20


@dataclass(frozen=True, slots=True)
class Total:
    """What is ahead: bytes of input, and rows, each where it is known without reading it."""

    nbytes: int | None
    rows: int | None


def share(meter: RunMetrics, total: Total) -> float | None:
    """How much is done, from 0 to 1: by rows where their number is known, else by bytes, else unknown."""
    done, whole = (meter.rows, total.rows) if total.rows is not None else (meter.input_bytes, total.nbytes)
    if whole is None:
        return None
    return min(1.0, done / whole) if whole else 1.0


def progress_line(meter: RunMetrics, total: Total, elapsed: float, columns: int | None = None) -> str:
    """Bar, rows, bytes, tokens per second, time left, failures; in so many ``columns``, as a longer line would wrap."""
    done = share(meter, total)
    rows = f"{meter.rows}/{total.rows}" if total.rows is not None else f"{meter.rows}"
    left = _clock(elapsed * (1 - done) / done) if done and elapsed > 0 else "-:--"
    size = _size(meter.input_bytes)
    parts = [
        "  ?%" if done is None else f"{done:4.0%}",
        f"{rows} rows",
        size if total.nbytes is None else f"{size} of {_size(total.nbytes)}",
        f"{_rate(meter.completion_tokens, elapsed):.0f} tokens/s",
        f"ETA {left}",
        f"{meter.failed} failed",
    ]
    told = "  ".join(parts)
    if columns is None or columns > _BAR + 3 + len(told):
        told = f"[{'=' * round((done or 0) * _BAR):{_BAR}}] {told}"
    return told if columns is None else told[: columns - 1]


def summary(meter: RunMetrics, elapsed: float) -> str:
    """What was done, how fast, and how busy the engine was."""
    busy = meter.busy.share()
    lines = [
        f"{meter.rows} rows, {meter.failed} failed, in {elapsed:.1f} s: {_rate(meter.rows, elapsed):.1f} rows/s, "
        f"{_rate(meter.completion_tokens, elapsed):.1f} tokens/s",
        f"{meter.prompt_tokens} tokens in, {meter.completion_tokens} out; {meter.retries} retries; the engine was busy "
        + ("for no time" if busy is None else f"{busy:.1%} of the time since its first batch"),
        f"undelivered at most: {meter.peak_undelivered} rows, {_size(meter.peak_undelivered_bytes)} of input",
    ]
    return "\n".join(lines)


def _rate(count: int, elapsed: float) -> float:
    return count / elapsed if elapsed > 0 else 0.0


def _size(count: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return f"{count} B"


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class Progress:
    """Draws the line anew while its block runs; draws nothing where ``shown`` is false."""

    def __init__(self, meter: RunMetrics, total: Total, out: TextIO, shown: bool) -> None:
        self._meter = meter
        self._total = total
        self._out = out
        self._shown = shown
        self._began = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Progress:
        if self._shown:
            self._task = asyncio.create_task(self._draw())
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._show()
            self._out.write("\n")

    async def _draw(self) -> None:
        while True:
            self._show()
            await asyncio.sleep(_EVERY_S)

    def _show(self) -> None:
        columns = shutil.get_terminal_size().columns if self._out.isatty() else None
        line = progress_line(self._meter, self._total, time.monotonic() - self._began, columns)
        self._out.write(f"\r\x1b[K{line}")
        self._out.flush()
