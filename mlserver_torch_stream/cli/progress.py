"""Draws a run's progress line on the terminal, and formats the summary at the end."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass
from typing import TextIO

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.cloud.run_metrics import RunMetrics

_EVERY_S = 0.2
_BAR = 20


@dataclass(frozen=True, slots=True)
class Total:
    """The number of bytes and rows of the input. A number is None if it is not known until the input has been read."""

    nbytes: int | None
    rows: int | None


def share(metrics: RunMetrics, total: Total) -> float | None:
    """Returns the share of the input that is done, from 0 to 1; None if this share is unknown.

    It is the share of the rows if their number is known, else the share of the bytes.
    """
    done, whole = (metrics.rows, total.rows) if total.rows is not None else (metrics.input_bytes, total.nbytes)
    if whole is None:
        return None
    return min(1.0, done / whole) if whole else 1.0


def progress_line(metrics: RunMetrics, total: Total, elapsed: float, columns: int | None = None) -> str:
    """Returns one line: bar, rows, bytes, tokens per second, time left and failures.

    The line is cut to ``columns`` characters, because a longer line would wrap.
    """
    done = share(metrics, total)
    rows = f"{metrics.rows}/{total.rows}" if total.rows is not None else f"{metrics.rows}"
    left = _clock(elapsed * (1 - done) / done) if done and elapsed > 0 else "-:--"
    size = format_bytes(metrics.input_bytes)
    parts = [
        "  ?%" if done is None else f"{done:4.0%}",
        f"{rows} rows",
        size if total.nbytes is None else f"{size} of {format_bytes(total.nbytes)}",
        f"{_rate(metrics.completion_tokens, elapsed):.0f} tokens/s",
        f"ETA {left}",
        f"{metrics.failed} failed",
    ]
    line = "  ".join(parts)
    if columns is None or columns > _BAR + 3 + len(line):
        line = f"[{'=' * round((done or 0) * _BAR):{_BAR}}] {line}"
    return line if columns is None else line[: columns - 1]


def summary(metrics: RunMetrics, elapsed: float) -> str:
    """Returns a run's counts, its speed and the share of time in which the engine was busy, in several lines."""
    busy = metrics.busy.share()
    lines = [
        f"{metrics.rows} rows, {metrics.failed} failed, in {elapsed:.1f} s: {_rate(metrics.rows, elapsed):.1f} rows/s, "
        f"{_rate(metrics.completion_tokens, elapsed):.1f} tokens/s",
        f"{metrics.prompt_tokens} tokens in, {metrics.completion_tokens} out; {metrics.retries} retries; "
        "the engine was busy " + ("for no time" if busy is None else f"{busy:.1%} of the time since its first batch"),
        f"undelivered at most: {metrics.peak_undelivered} rows, "
        f"{format_bytes(metrics.peak_undelivered_bytes)} of input",
    ]
    return "\n".join(lines)


def _rate(count: int, elapsed: float) -> float:
    return count / elapsed if elapsed > 0 else 0.0


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class Progress:
    """Redraws the line during its ``async with`` block. Draws nothing if ``shown`` is false."""

    def __init__(self, metrics: RunMetrics, total: Total, out: TextIO, shown: bool) -> None:
        self._metrics = metrics
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
        line = progress_line(self._metrics, self._total, time.monotonic() - self._began, columns)
        self._out.write(f"\r\x1b[K{line}")
        self._out.flush()
