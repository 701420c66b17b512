"""Reads a function call (a JSON object) character by character while it is generated.

The key of the arguments may also be ``parameters``. A number outside brackets is refused, because its end could not be
recognised.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

WHITESPACE = " \t\n\r"
_DIGITS = "0123456789"
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
# The characters that may follow each character of a number; "i" stands for a digit of the integer part, "f" of the
# fraction, "x" of the exponent.
_NUMBER: dict[str, dict[str, str]] = {
    "-": {"0": "0", **dict.fromkeys("123456789", "i")},
    "0": {".": ".", "e": "e", "E": "e"},
    "i": {".": ".", "e": "e", "E": "e", **dict.fromkeys(_DIGITS, "i")},
    ".": dict.fromkeys(_DIGITS, "f"),
    "f": {"e": "e", "E": "e", **dict.fromkeys(_DIGITS, "f")},
    "e": {"+": "+", "-": "+", **dict.fromkeys(_DIGITS, "x")},
    "+": dict.fromkeys(_DIGITS, "x"),
    "x": dict.fromkeys(_DIGITS, "x"),
}
_NUMBER_ENDS = "0ifx"


class JsonScanner:
    """Checks JSON character by character.

    ``push`` adds a character, and returns False if no JSON value can begin with the characters so far. ``complete``
    means that the value has ended.
    """

    def __init__(self) -> None:
        self.complete = False
        self._closing: list[str] = []  # the brackets that are open
        self._state: Callable[[str], bool] = self._value
        self._rest = ""  # the characters of a literal that are still to come
        self._number = ""
        self._hex = 0  # how many digits of \u0000 are still to come
        self._is_key = False

    def push(self, char: str) -> bool:
        return not self.complete and self._state(char)

    def _value(self, char: str) -> bool:
        if char in WHITESPACE:
            return True
        if char == '"':
            self._state, self._is_key = self._string, False
        elif char == "{":
            self._closing.append("}")
            self._state = self._first_key
        elif char == "[":
            self._closing.append("]")
            self._state = self._first_element
        elif char in _LITERALS:
            self._state, self._rest = self._literal, _LITERALS[char]
        elif self._closing and (char in _DIGITS or char == "-"):
            self._state, self._number = self._in_number, "i" if char in "123456789" else char
        else:
            return False
        return True

    def _first_key(self, char: str) -> bool:
        return self._close() if char == "}" else self._key(char)

    def _key(self, char: str) -> bool:
        if char == '"':
            self._state, self._is_key = self._string, True
        return char == '"' or char in WHITESPACE

    def _colon(self, char: str) -> bool:
        if char == ":":
            self._state = self._value
        return char == ":" or char in WHITESPACE

    def _first_element(self, char: str) -> bool:
        if char == "]":
            return self._close()
        return self._value(char)

    def _after_value(self, char: str) -> bool:
        """The state after a value within brackets."""
        if char == self._closing[-1]:
            return self._close()
        if char == ",":
            self._state = self._key if self._closing[-1] == "}" else self._value
        return char == "," or char in WHITESPACE

    def _close(self) -> bool:
        self._closing.pop()
        return self._ended()

    def _ended(self) -> bool:
        """Called when a value has ended."""
        self._state = self._after_value
        self.complete = not self._closing
        return True

    def _string(self, char: str) -> bool:
        if char == '"':
            if not self._is_key:
                return self._ended()
            self._state = self._colon
        elif char == "\\":
            self._state = self._escape
        return char >= " "

    def _escape(self, char: str) -> bool:
        self._state = self._string
        if char == "u":
            self._state, self._hex = self._code, 4
        return char in '"\\/bfnrtu'

    def _code(self, char: str) -> bool:
        self._hex -= 1
        if not self._hex:
            self._state = self._string
        return char in "0123456789abcdefABCDEF"

    def _literal(self, char: str) -> bool:
        if char != self._rest[0]:
            return False
        self._rest = self._rest[1:]
        return bool(self._rest) or self._ended()

    def _in_number(self, char: str) -> bool:
        following = _NUMBER[self._number].get(char)
        if following is None:
            return self._number in _NUMBER_ENDS and self._ended() and self._after_value(char)
        self._number = following
        return True


_IGNORED_KEYS = ("id", "type", "tool_call_id")  # keys whose values are strings
_NO_ARGUMENTS = "{}"
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class CallReader(ABC):
    """Reads one call. ``name`` is the function's name once it is known; ``complete`` means that the call has ended."""

    name: str | None
    complete: bool

    @abstractmethod
    def push(self, char: str) -> bool:
        """Adds the next character. Returns False if the call cannot continue with it."""

    @abstractmethod
    def take(self) -> str:
        """Returns the text of the arguments since the last call of this method; empty until the name is known."""


@dataclass(frozen=True, slots=True)
class CallKeys:
    """The key of the function's name, and the possible keys of its arguments."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")


class ArgumentsReader(CallReader):
    """Reads arguments: an object, an object in a JSON string, or null. The text of an object is returned as it arrives.

    ``name`` is the function's name, if it is known before the arguments.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.complete = False
        self._scanner = JsonScanner()
        self._read = ""
        self._taken = 0

    def push(self, char: str) -> bool:
        """Adds the next character. Returns False if the text cannot be arguments."""
        if not self._read and char in WHITESPACE:
            return True
        if not self._read and char not in '{"n':
            return False
        if not self._scanner.push(char):
            return False
        self._read += char
        if not self._scanner.complete:
            return True
        if self._read[0] != "{":
            self._read = _as_object(self._read)
        self.complete = bool(self._read)
        return self.complete

    def take(self) -> str:
        if not self.complete and not self._read.startswith("{"):
            return ""
        piece = self._read[self._taken :]
        self._taken = len(self._read)
        return piece


class ObjectReader(CallReader):
    """Reads a call that is one JSON object.

    ``names`` are the functions that may be called; None means any function.
    """

    def __init__(self, names: Collection[str] | None = None, keys: CallKeys | None = None) -> None:
        self.name: str | None = None
        self.complete = False
        self._names = names
        self._keys = keys or CallKeys()
        self._state: Callable[[str], bool] = self._open
        self._scanner = JsonScanner()
        self._raw = ""  # the text of a key, or of a value other than the arguments
        self._key = ""
        self._seen: set[str] = set()
        self._arguments: ArgumentsReader | None = None

    def push(self, char: str) -> bool:
        return not self.complete and self._state(char)

    def take(self) -> str:
        if self.name is None or (self._arguments is None and not self.complete):
            return ""
        if self._arguments is None:
            self._arguments = ArgumentsReader()
            for char in _NO_ARGUMENTS:
                self._arguments.push(char)
        return self._arguments.take()

    def _open(self, char: str) -> bool:
        if char == "{":
            self._state = self._before_key
        return char == "{" or char in WHITESPACE

    def _before_key(self, char: str) -> bool:
        if char == '"':
            self._begin(self._in_key)
            return self._in_key(char)
        return char in WHITESPACE

    def _begin(self, state: Callable[[str], bool]) -> None:
        self._scanner, self._raw, self._state = JsonScanner(), "", state

    def _in_key(self, char: str) -> bool:
        if not self._scanner.push(char):
            return False
        self._raw += char
        if not self._scanner.complete:
            return True
        self._key, self._state = str(json.loads(self._raw)), self._colon
        kind = "arguments" if self._key in self._keys.arguments else self._key
        known = kind in ("arguments", self._keys.name, *_IGNORED_KEYS) and kind not in self._seen
        self._seen.add(kind)
        return known

    def _colon(self, char: str) -> bool:
        if char == ":" and self._key in self._keys.arguments:
            self._arguments, self._state = ArgumentsReader(), self._in_arguments
        elif char == ":":
            self._begin(self._in_string)
        return char == ":" or char in WHITESPACE

    def _in_arguments(self, char: str) -> bool:
        assert self._arguments is not None
        if not self._arguments.push(char):
            return False
        if self._arguments.complete:
            self._state = self._after_value
        return True

    def _in_string(self, char: str) -> bool:
        if not self._raw and char in WHITESPACE:
            return True
        if (not self._raw and char != '"') or not self._scanner.push(char):
            return False
        self._raw += char
        if not self._scanner.complete:
            return True
        self._state = self._after_value
        return self._key != self._keys.name or self._named(str(json.loads(self._raw)))

    def _named(self, name: str) -> bool:
        self.name = name
        return FUNCTION_NAME.fullmatch(name) is not None and (self._names is None or name in self._names)

    def _after_value(self, char: str) -> bool:
        if char == "}":
            self.complete = self.name is not None
            return self.complete
        if char == ",":
            self._state = self._before_key
        return char == "," or char in WHITESPACE


def _as_object(text: str) -> str:
    """Returns the text of the object in a JSON string, "{}" for null, or "" if the string contains no object."""
    value: Any = json.loads(text)
    if value is None:
        return _NO_ARGUMENTS
    try:
        value.encode()  # half of a surrogate pair has no bytes
        return str(value) if isinstance(json.loads(value), dict) else ""
    except ValueError:
        return ""
