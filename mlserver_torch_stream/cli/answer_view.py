"""Shows one answer in a terminal: its reasoning and its tool calls dimmed, its text plain.

Knows nothing of conversations and servers.
"""

from __future__ import annotations

from typing import TextIO

from mlserver_torch_stream.client import Delta, ToolCallDelta

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
_CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class AnswerView:
    """Without ``styled`` it shows the text alone, as the model wrote it."""

    def __init__(self, sink: TextIO, *, styled: bool) -> None:
        self._sink = sink
        self._styled = styled
        self._dim = False
        self._last: bool | None = None  # whether what was shown last is dimmed
        self._call: int | None = None  # the call that is shown

    def add(self, delta: Delta) -> None:
        if not self._styled:
            self._sink.write(delta.text)
            return
        self._show(delta.reasoning, dim=True)
        self._show(delta.text, dim=False)
        for call in delta.tool_calls:
            self._show_call(call)

    def end(self) -> None:
        """Ends the style, also of an answer that was stopped."""
        if self._call is not None:
            self._sink.write(")")
        if self._dim:
            self._sink.write(PLAIN)
        self._dim, self._call = False, None

    def _show_call(self, call: ToolCallDelta) -> None:
        if call.index != self._call:
            self.end()
            self._call = call.index
            self._show(f"{call.name}(", dim=True, apart=True)
        self._show(call.arguments, dim=True)

    def _show(self, text: str, *, dim: bool, apart: bool = False) -> None:
        """``apart``: on a line of its own, as a change between reasoning and text is."""
        if not text:
            return
        if not dim:
            self.end()
        if apart or dim != self._last:
            self._sink.write("" if self._last is None else "\n")
        if dim and not self._dim:
            self._sink.write(DIM)
        self._dim = self._last = dim
        self._sink.write(visible(text))


def visible(text: str) -> str:
    """The text without the control characters that would steer a terminal."""
    return text.translate(_CONTROL)
