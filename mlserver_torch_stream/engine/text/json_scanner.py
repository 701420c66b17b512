"""Reads one JSON value character by character, and says at once where it ends and where it is none.

Knows nothing of the meaning of a value. A number outside brackets is refused, because no character ends it.
"""

from __future__ import annotations

from collections.abc import Callable

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
    """``push`` takes the next character, and returns False if the text so far begins no JSON value.

    ``complete``: the value has ended.
    """

    def __init__(self) -> None:
        self.complete = False
        self._closing: list[str] = []  # the brackets that are open
        self._state: Callable[[str], bool] = self._value
        self._rest = ""  # of a literal
        self._number = ""
        self._hex = 0  # digits to come of \u0000
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
        """After a value within brackets."""
        if char == self._closing[-1]:
            return self._close()
        if char == ",":
            self._state = self._key if self._closing[-1] == "}" else self._value
        return char == "," or char in WHITESPACE

    def _close(self) -> bool:
        self._closing.pop()
        return self._ended()

    def _ended(self) -> bool:
        """A value has ended."""
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
