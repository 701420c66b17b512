"""Turns token ids into text, one by one, never splits a character, and finds stop strings.

Each token costs the same, and odd ids raise nothing. Stop strings are found by an Aho-Corasick automaton over
characters, in pure Python.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_PENDING_CHARS = 3  # the bytes of an unfinished character decode to at most so many replacement characters
_CONTEXT = 4  # tokens kept before new ones: their text fixes the space in front of the next
_WINDOW = 16  # tokens after which the window is cut back to its context
_STUCK = 32  # tokens after which it is cut although its end is unfinished


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The texts that ``push`` and ``flush`` return join to the decode of all ids."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these ids complete. The grouping of ids into calls does not change the joined text."""

    def flush(self, *, cut: bool = False) -> str:
        """Returns the rest of the text at the end of the sequence; an unfinished character becomes its replacement.

        ``cut``: the sequence was ended from outside, by its time limit or a shutdown: such a character is left out.
        """


class ByteDetokenizer:
    """For tokenizers whose only decoder is ByteLevel: concatenates the bytes of tokens, and decodes them as UTF-8."""

    def __init__(self, token_bytes: Callable[[int], bytes], silent: frozenset[int]) -> None:
        """``silent``: tokens that are skipped."""
        self._token_bytes = token_bytes
        self._silent = silent
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(
            b"".join([self._token_bytes(token_id) for token_id in token_ids if token_id not in self._silent])
        )

    def flush(self, *, cut: bool = False) -> str:
        rest = self._decoder.decode(b"", final=True)
        return "" if cut else rest


class WindowDetokenizer:
    """Decodes a short window of recent tokens and returns what is new in its text, for any tokenizer.

    There is one exception to what ``Detokenizer`` says: tokenizers with byte fallback can emit, byte by byte, a run
    that is not UTF-8 or that spells the replacement character. The characters that were complete stay as they were
    returned, where a whole decode replaces the entire run, and the number of replacement characters can differ.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], silent: frozenset[int]) -> None:
        """``silent``: tokens that are skipped: they never reach a ``decode``."""
        self._decode = decode
        self._silent = silent
        self._window: list[int] = []
        self._returned = ""  # the text of the window that has been returned
        self._complete = 0  # tokens of the window whose text has been returned entirely
        self._cut = 0  # an earlier such count, where the window may be cut

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push(token_id) for token_id in token_ids if token_id not in self._silent])

    def flush(self, *, cut: bool = False) -> str:
        text = self._decode(self._window)
        if text.startswith(self._returned):
            rest = text[len(self._returned) :]
        else:
            rest = self._decode(self._window[self._complete :])
        self._window, self._returned, self._complete, self._cut = [], "", 0, 0
        return rest.rstrip(_REPLACEMENT) if cut else rest

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.startswith(self._returned):
            return self._restart() if self._broken(text) else ""
        return self._release(text)

    def _release(self, text: str) -> str:
        """Returns the text of the window that is new and cannot change."""
        unfinished = min(len(text) - len(text.rstrip(_REPLACEMENT)), _PENDING_CHARS)
        certain = max(len(text) - unfinished, len(self._returned))
        new = text[len(self._returned) : certain]
        self._returned = text[:certain]
        if certain == len(text):
            self._mark_complete()
        elif len(self._window) >= _STUCK:
            self._trim(len(self._window) - 2 * _CONTEXT, unfinished)
        return new

    def _mark_complete(self) -> None:
        self._complete = len(self._window)
        if self._complete >= _WINDOW and self._cut:
            self._trim(self._cut, 0)
        elif self._complete >= _WINDOW - _CONTEXT and not self._cut:
            self._cut = self._complete

    def _trim(self, start: int, unfinished: int) -> None:
        """Drops the tokens before ``start``. The last ``unfinished`` characters are not returned yet."""
        text = self._decode(self._window[start:])
        if not text and len(self._window) < _STUCK:
            return  # a context without text would not keep the next token's leading space
        self._window = self._window[start:]
        self._returned = text[: len(text) - unfinished]
        self._complete = len(self._window) - unfinished
        self._cut = 0

    def _broken(self, text: str) -> bool:
        """Whether the returned text differs from the window's for good, not only until a character is complete."""
        return not text.endswith(_REPLACEMENT) or len(self._window) - self._complete > 2 * _CONTEXT

    def _restart(self) -> str:
        """Starts a new window at the first token that has not been returned entirely."""
        self._window = self._window[self._complete :]
        self._returned, self._complete, self._cut = "", 0, 0
        return self._release(self._decode(self._window))


class StopMatcher:
    """Searches one text for stop strings. With ``include`` it releases the stop string itself, otherwise no part of it.

    The stop that is complete first wins, so that a model stops as soon as it can; of several that are complete at the
    same character, the longest wins. The cuts between the parts of the text change nothing. Empty stop strings are
    ignored.
    """

    def __init__(self, stops: StopStrings, include: bool) -> None:
        self._automaton = stops
        self._include = include
        self._state = 0
        self._held = ""
        self.hit: str | None = None  # the stop string that was found

    def push(self, text: str) -> str:
        """Adds the next part of the text and returns the text that is released; after a hit, always nothing."""
        if self.hit is not None:
            return ""
        automaton, state = self._automaton, self._state
        if not automaton.stops:
            return text
        for position, char in enumerate(text):
            state = automaton.step(state, char)
            if (stop := automaton.found[state]) is not None:
                return self._finish(self._held + text[: position + 1], stop)
        self._state = state
        return self._release(self._held + text, 0 if self._include else automaton.depth[state])

    def flush(self) -> str:
        """Returns the text that is held back, when the text ends for another reason; nothing after a hit."""
        held, self._held = self._held, ""
        self._state = 0
        return held

    def _release(self, text: str, hold: int) -> str:
        cut = len(text) - hold
        self._held = text[cut:]
        return text[:cut]

    def _finish(self, text: str, stop: str) -> str:
        self.hit = stop
        self._held = ""
        return text if self._include else text[: len(text) - len(stop)]


class StopStrings:
    """The automaton of the stop strings of a request, which the matchers of all its sequences share.

    A state is the longest prefix of a stop string with which the text so far ends. State 0 is the empty prefix.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [stop for stop in dict.fromkeys(stops) if stop]
        self.depth = [0]  # length of the state's prefix
        self.found: list[str | None] = [None]  # the longest stop string that the state's prefix ends with
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        for stop in self.stops:
            self._add(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        """Returns the state after one more character, in constant time on average."""
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._fallback[state]
        return self._next[state][char]

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self.depth)
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
                self._next.append({})
                self._fallback.append(0)
            state = self._next[state][char]
        self.found[state] = stop

    def _link(self) -> None:
        """Sets each state's fallback, breadth first: its longest proper suffix that is a state too."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], char)
                queue.append(child)
            if self.found[state] is None:
                self.found[state] = self.found[self._fallback[state]]
