"""Finds tool calls in an answer's text, in the formats of Hermes, Llama 3 and Mistral models.

Text that begins like a call but is not one is returned as text. If a call breaks off after its name was returned, its
whole text, including the mark, is also returned as text. Whitespace around calls is left out.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection

from mlserver_torch_stream.engine.text.answer_format import Part, joined
from mlserver_torch_stream.engine.text.call_reader import (
    FUNCTION_NAME,
    WHITESPACE,
    ArgumentsReader,
    CallReader,
    ObjectReader,
)
from mlserver_torch_stream.tool_calls import ToolCallDelta

ARGUMENTS_MARK, ID_MARK = "[ARGS]", "[CALL_ID]"


def call_id() -> str:
    """Returns a new random id of a tool call: ``call_`` and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Returns a random id of nine letters and digits; Mistral's templates accept no other form."""
    return secrets.token_hex(5)[:9]


class MarkedCalls:
    """A state machine over characters. ``mark`` begins a call; the mark's first character occurs in it only once.

    A state returns False for a character that cannot follow. Then everything since the mark counts as text, and the
    character is read again as text.
    """

    mark = ""
    reasons = False
    new_id: Callable[[], str] = staticmethod(call_id)

    def __init__(self, names: Collection[str], *, parallel: bool = True) -> None:
        """Finds calls of the functions ``names``. If ``parallel`` is false, an answer has at most one call."""
        self.called = 0
        self.broken = False
        self.ended = False
        self._names = names
        self._parallel = parallel
        self._state: Callable[[str], bool] = self._in_text
        self._parts: list[Part] = []
        self._space = ""  # whitespace before ``_raw``
        self._raw = ""  # the text of a mark or call that may turn out to be neither
        self._strips = False  # whether whitespace is dropped, as it is after a call
        self._listed = False  # whether a list of calls is open
        self._reader: CallReader | None = None
        self._begun = False  # whether the name of the call has been returned

    def push(self, text: str) -> list[Part]:
        for char in text:
            if self.ended:
                break
            if self._state != self._in_text:
                self._raw += char
            if not self._state(char):
                self._give_up(self._raw[:-1])
                self._in_text(char)
        return self._take()

    def flush(self) -> list[Part]:
        if self._begun:
            self.broken = True
        elif self._state != self._after_call:
            self._say(self._raw)
        self.ended = True
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return joined(parts)

    def _give_up(self, raw: str) -> None:
        self.broken = self.broken or self._begun
        self._begun, self._reader = False, None
        self._say(raw)
        self._state = self._in_text

    def _say(self, text: str) -> None:
        said = self._space + text
        if self._strips:
            said = said.lstrip()
        self._strips = self._strips and not said
        self._parts.append(said)
        self._space = self._raw = ""

    def _in_text(self, char: str) -> bool:
        if self.mark.startswith(self._raw + char):
            self._raw += char
            if self._raw == self.mark:
                self._marked()
            return True
        if self._raw:
            self._say(self._raw)
        if char.isspace():
            self._space += char
        elif char == self.mark[0]:
            self._raw = char
        else:
            self._say(char)
        return True

    def _marked(self) -> None:
        """Called when a mark is complete."""
        self._state = self._next_call

    def _next_call(self, char: str) -> bool:
        """The state before the first character of a call; whitespace may precede the call."""
        return self._read(ObjectReader(), char)

    def _read(self, reader: CallReader, char: str) -> bool:
        """Begins to read a call with this character."""
        self._reader, self._state = reader, self._in_call
        return self._in_call(char)

    def _in_call(self, char: str) -> bool:
        """The state inside a call. Adds the part of the call that no further text can change."""
        reader = self._reader
        assert reader is not None
        if not reader.push(char):
            return False
        piece = reader.take()
        if piece:
            self._give(reader.name, piece)
        if reader.complete:
            self._complete()
        return True

    def _give(self, name: str | None, piece: str) -> None:
        """Adds a piece of a call's arguments; the call's name comes before the first piece."""
        if not self._begun:
            self._begun = True
            self._parts.append(ToolCallDelta(self.called, self.new_id(), name))
            self.called += 1
        self._parts.append(ToolCallDelta(self.called - 1, arguments=piece))

    def _complete(self) -> None:
        self._begun, self._reader = False, None
        self._space = self._raw = ""
        self._strips = True
        self.ended = not self._parallel
        self._state = self._after_call

    def _after_call(self, char: str) -> bool:
        if self._listed and char == ",":
            self._state = self._next_call
        elif self._listed and char == "]":
            self._listed, self._raw = False, ""
        else:
            return char in WHITESPACE
        return True


class HermesCalls(MarkedCalls):
    """Finds ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Hermes and Qwen write it.

    The end mark may be missing.
    """

    mark = "<tool_call>"
    end = "</tool_call>"

    def _after_call(self, char: str) -> bool:
        read = self._raw.lstrip(WHITESPACE)
        if read == self.end:
            self._raw, self._state = "", self._in_text
        return self.end.startswith(read)


class LlamaCalls(MarkedCalls):
    """Finds ``{"name": …, "parameters": {…}}`` as the whole answer or after a mark. Semicolons separate calls.

    An object without a mark is a call only if a function of that name may be called.
    """

    mark = "<|python_tag|>"

    def __init__(self, names: Collection[str], *, parallel: bool = True) -> None:
        super().__init__(names, parallel=parallel)
        self._state = self._start

    def _start(self, char: str) -> bool:
        read = self._raw.lstrip(WHITESPACE)
        if read == "{":
            return self._read(ObjectReader(self._names), char)
        if read == self.mark:
            self._marked()
        return self.mark.startswith(read)

    def _after_call(self, char: str) -> bool:
        if char == ";":
            self._marked()
        return char == ";" or char in WHITESPACE


class MistralCalls(MarkedCalls):
    """Finds ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}`` of newer models."""

    mark = "[TOOL_CALLS]"
    new_id = staticmethod(short_call_id)

    def _marked(self) -> None:
        self._listed, self._state = False, self._after_mark

    def _after_mark(self, char: str) -> bool:
        if char in WHITESPACE:
            return True
        if char != "[":
            return self._read(NamedReader(), char)
        self._listed, self._state = True, self._next_call
        return True


class NamedReader(ArgumentsReader):
    """Reads ``name[ARGS]{…}``; an id before ``[ARGS]`` is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self._head = ""

    def push(self, char: str) -> bool:
        if self.name is not None:
            return super().push(char)
        self._head += char
        name, bracket, marks = self._head.partition("[")
        if FUNCTION_NAME.fullmatch(name) is None:
            return False
        if self._head.endswith(ARGUMENTS_MARK):
            self.name = name
            return True
        return not bracket or _goes_on(f"[{marks}")


def _goes_on(marks: str) -> bool:
    """Returns whether ``[ARGS]`` can still follow, perhaps after an id."""
    if ARGUMENTS_MARK.startswith(marks) or ID_MARK.startswith(marks):
        return True
    identifier, _, rest = marks.removeprefix(ID_MARK).partition("[")
    has_id = marks.startswith(ID_MARK) and (identifier.isalnum() or not identifier)
    return has_id and (not rest or ARGUMENTS_MARK.startswith(f"[{rest}"))
