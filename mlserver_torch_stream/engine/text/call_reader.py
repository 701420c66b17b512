"""Reads one call of a function, an object with ``name`` and ``arguments``, character by character.

Knows nothing of the text around the object, nor of ids. ``parameters`` is another name of the arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from mlserver_torch_stream.engine.text.json_scanner import WHITESPACE, JsonScanner

_IGNORED_KEYS = ("id", "type", "tool_call_id")  # whose values are strings
_NO_ARGUMENTS = "{}"
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class CallKeys:
    """The keys of the function's name, and of its arguments."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")


class ArgumentsReader:
    """Reads arguments: an object, whose text is given as it comes, or the same as a JSON string, or null.

    ``name``: of the function, if it is known before its arguments.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.complete = False
        self._scanner = JsonScanner()
        self._read = ""
        self._taken = 0

    def push(self, char: str) -> bool:
        """Returns False if these are no arguments."""
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
        """Returns the text of the arguments since the last call."""
        if not self.complete and not self._read.startswith("{"):
            return ""
        piece = self._read[self._taken :]
        self._taken = len(self._read)
        return piece


class CallReader:
    """``push`` takes the next character and returns False if no call goes on with it.

    ``names``: of the functions that may be called; None: of any function.
    """

    def __init__(self, names: Collection[str] | None = None, keys: CallKeys | None = None) -> None:
        self.name: str | None = None
        self.complete = False
        self._names = names
        self._keys = keys or CallKeys()
        self._state: Callable[[str], bool] = self._open
        self._scanner = JsonScanner()
        self._raw = ""  # of a key, or of a value that is not the arguments
        self._key = ""
        self._seen: set[str] = set()
        self._arguments: ArgumentsReader | None = None

    def push(self, char: str) -> bool:
        return not self.complete and self._state(char)

    def take(self) -> str:
        """Returns the text of the arguments since the last call; nothing before the name is known."""
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
    """Returns the object in a JSON string, none for null, and nothing where the string holds something else."""
    value: Any = json.loads(text)
    if value is None:
        return _NO_ARGUMENTS
    try:
        value.encode()  # half of a surrogate pair has no bytes
        return str(value) if isinstance(json.loads(value), dict) else ""
    except ValueError:
        return ""
