"""Finds tool calls in an answer's text, as Hermes, Llama 3 and Mistral models spell them.

Knows nothing of tokens. What looks like a call and is none is given as text; a call that breaks after it has begun is
given as text too, all of it. Whitespace beside calls is left out.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from typing import Protocol

from mlserver_torch_stream.engine.text.answer_parts import Part, joined
from mlserver_torch_stream.engine.text.call_reader import FUNCTION_NAME, ArgumentsReader, CallReader
from mlserver_torch_stream.engine.text.json_scanner import WHITESPACE
from mlserver_torch_stream.tool_calls import ToolCallDelta

ARGUMENTS_MARK, ID_MARK = "[ARGS]", "[CALL_ID]"


class Reader(Protocol):
    """Reads one call. ``push`` returns False if no call goes on with the character."""

    @property
    def name(self) -> str | None: ...

    @property
    def complete(self) -> bool: ...

    def push(self, char: str) -> bool: ...

    def take(self) -> str: ...


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters and digits: Mistral's templates take no other ids."""
    return secrets.token_hex(5)[:9]


class MarkedCalls:
    """A state machine that takes one character after the other. ``mark`` begins a call; its first character is unlike
    all others of it.

    A state returns False at a character with which nothing goes on: what has been read since the mark is text then,
    and the character is read again as text.
    """

    mark = ""
    reasons = False

    def __init__(self, names: Collection[str], *, parallel: bool = True, new_id: Callable[[], str] = call_id) -> None:
        self.called = 0
        self.broken = False
        self.ended = False
        self._names = names
        self._parallel = parallel
        self._new_id = new_id
        self._state: Callable[[str], bool] = self._text
        self._parts: list[Part] = []
        self._space = ""  # whitespace before what ``_raw`` has
        self._raw = ""  # of a mark or a call that is not certain
        self._after_call = False
        self._reader: Reader | None = None
        self._begun = False  # the call has been given

    def push(self, text: str) -> list[Part]:
        for char in text:
            if self.ended:
                break
            if self._state != self._text:
                self._raw += char
            if not self._state(char):
                self._give_up(self._raw[:-1])
                self._text(char)
        return self._take()

    def flush(self) -> list[Part]:
        if self._begun:  # its name and the arguments so far have been given
            self.broken = True
        elif self._state != self._behind:
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
        self._state = self._text

    def _say(self, text: str) -> None:
        said = self._space + text
        if self._after_call:
            said = said.lstrip()
        self._after_call = self._after_call and not said
        self._parts.append(said)
        self._space = self._raw = ""

    def _text(self, char: str) -> bool:
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
        """A mark has been read."""
        self._read(CallReader(), self._call)

    def _read(self, reader: Reader, state: Callable[[str], bool]) -> None:
        self._reader, self._state = reader, state

    def _call(self, char: str) -> bool:
        """Within a call: returns the part of it that is certain."""
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
        """Gives a piece of a call's arguments, behind its name if that is not given yet."""
        if not self._begun:
            self._begun = True
            self._parts.append(ToolCallDelta(self.called, self._new_id(), name))
            self.called += 1
        self._parts.append(ToolCallDelta(self.called - 1, arguments=piece))

    def _complete(self) -> None:
        self._begun, self._reader = False, None
        self._space = self._raw = ""
        self._after_call = True
        self.ended = not self._parallel
        self._state = self._behind

    def _behind(self, char: str) -> bool:
        """Behind a whole call."""
        self._state = self._text
        return False


class HermesCalls(MarkedCalls):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Qwen has it too. The end mark may be missing."""

    mark = "<tool_call>"
    end = "</tool_call>"

    def _behind(self, char: str) -> bool:
        read = self._raw.lstrip(WHITESPACE)
        if read == self.end:
            self._raw, self._state = "", self._text
        return self.end.startswith(read)


class LlamaCalls(MarkedCalls):
    """``{"name": …, "parameters": {…}}`` as the whole answer, or behind a mark; several have a semicolon between them.

    An object without a mark is a call only if a function of that name may be called.
    """

    mark = "<|python_tag|>"

    def __init__(self, names: Collection[str], *, parallel: bool = True, new_id: Callable[[], str] = call_id) -> None:
        super().__init__(names, parallel=parallel, new_id=new_id)
        self._state = self._start

    def _start(self, char: str) -> bool:
        read = self._raw.lstrip(WHITESPACE)
        if read == "{":
            self._read(CallReader(self._names), self._call)
            return self._call(char)
        if read == self.mark:
            self._marked()
        return self.mark.startswith(read)

    def _behind(self, char: str) -> bool:
        if char == ";":
            self._marked()
        return char == ";" or char in WHITESPACE


class MistralCalls(MarkedCalls):
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`` or, of newer models, ``[TOOL_CALLS]name[ARGS]{…}`` each."""

    mark = "[TOOL_CALLS]"

    def __init__(
        self, names: Collection[str], *, parallel: bool = True, new_id: Callable[[], str] = short_call_id
    ) -> None:
        super().__init__(names, parallel=parallel, new_id=new_id)
        self._listed = False  # in a list

    def _marked(self) -> None:
        self._listed, self._state = False, self._first

    def _first(self, char: str) -> bool:
        if char in WHITESPACE:
            return True
        if char == "[":
            self._listed = True
            self._read(CallReader(), self._call)
            return True
        self._read(NamedReader(), self._call)
        return self._call(char)

    def _behind(self, char: str) -> bool:
        if char in WHITESPACE:
            return True
        if self._listed and char == ",":
            self._read(CallReader(), self._call)
            return True
        if self._listed and char == "]":
            self._raw, self._state = "", self._text
            return True
        return False


class NamedReader:
    """Reads ``name[ARGS]{…}``; an id between the two is passed over."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._head = ""
        self._arguments = ArgumentsReader()

    @property
    def complete(self) -> bool:
        return self._arguments.complete

    def take(self) -> str:
        return self._arguments.take()

    def push(self, char: str) -> bool:
        if self.name is not None:
            return self._arguments.push(char)
        self._head += char
        name, bracket, behind = self._head.partition("[")
        if FUNCTION_NAME.fullmatch(name) is None:
            return False
        if self._head.endswith(ARGUMENTS_MARK):
            self.name = name
            return True
        return not bracket or _goes_on(f"[{behind}")


def _goes_on(marks: str) -> bool:
    """Whether ``[ARGS]`` can still come, with an id before it."""
    if ARGUMENTS_MARK.startswith(marks) or ID_MARK.startswith(marks):
        return True
    identifier, _, behind = marks.removeprefix(ID_MARK).partition("[")
    mark = marks.startswith(ID_MARK) and (identifier.isalnum() or not identifier)
    return mark and (not behind or ARGUMENTS_MARK.startswith(f"[{behind}"))
