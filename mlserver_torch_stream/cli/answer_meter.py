"""Measures one answer: its tokens, how fast they arrive, and the time to the first token.

Knows nothing of terminals and servers; its caller gives it the time.
"""

from __future__ import annotations

from mlserver_torch_stream.client import Delta


class AnswerMeter:
    """Times are in seconds on any clock. A delta without token ids counts as one token; unless the server tells its
    own count at the end, the sum of such deltas is shown as an estimate."""

    def __init__(self, now: float) -> None:
        self._asked = now
        self._first = self._last = now
        self._first_tokens = 0  # a delta may hold several
        self._tokens = 0
        self._estimated = False

    def add(self, delta: Delta, now: float) -> None:
        if delta.text or delta.reasoning or delta.tool_calls or delta.token_ids:
            count = len(delta.token_ids) or 1
            if not self._tokens:
                self._first, self._first_tokens = now, count
            self._last = now
            self._tokens += count
            self._estimated = self._estimated or not delta.token_ids
        if delta.usage is not None:
            self._tokens, self._estimated = delta.usage.completion_tokens, False

    def summary(self) -> str:
        """One line; empty if there was no token."""
        if not self._tokens:
            return ""
        parts = [f"{'~' if self._estimated else ''}{self._tokens} token{'' if self._tokens == 1 else 's'}"]
        later, seconds = self._tokens - self._first_tokens, self._last - self._first
        if later > 0 and seconds > 0:
            parts.append(f"{later / seconds:.1f} tokens/s")
        return ", ".join([*parts, f"first token after {self._first - self._asked:.2f} s"])
