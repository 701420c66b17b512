"""Finds stop strings in a growing text, and holds back text that can still become one.

Knows nothing of tokens or sequences. It is the Aho-Corasick automaton over characters, in pure Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


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
