"""Divides an answer's text into the reasoning at its beginning and the rest.

Knows nothing of tool calls, nor of how a chat template asks for a reasoning.
"""

from __future__ import annotations

from collections.abc import Callable

from mlserver_torch_stream.engine.text.answer_parts import Part, Reasoning

BEGIN, END = "<think>", "</think>"


class ReasoningParser:
    """Leaves out whitespace at both ends of the reasoning and before the answer's text.

    ``begun``: the prompt has begun the reasoning.
    """

    def __init__(self, *, begun: bool) -> None:
        self._state: Callable[[str], str | None] = self._reasoning if begun else self._start
        self._held = ""  # whitespace, then the beginning of a mark
        self._inside = ""  # reasoning that ``push`` is to return
        self._any = False  # there is reasoning that is not whitespace
        self.over = False  # the reasoning has ended, or there is none

    @property
    def reasons(self) -> bool:
        return not self.over and self._state == self._reasoning

    def push(self, text: str) -> tuple[list[Part], str]:
        """Returns the reasoning, and the answer's text after it."""
        if self.over:
            return [], text
        for position, char in enumerate(text):
            rest = self._state(char)
            if rest is not None:
                self.over = True
                return self._take(), rest + text[position + 1 :]
        return self._take(), ""

    def flush(self) -> tuple[list[Part], str]:
        held, self._held = self._held, ""
        reasons, self.over = self.reasons, True
        if not reasons:
            return [], held
        self._inside += held if self._any else held.lstrip()
        return self._take(), ""

    def _take(self) -> list[Part]:
        inside, self._inside = self._inside, ""
        return [Reasoning(inside)] if inside else []

    def _start(self, char: str) -> str | None:
        """Before the first word."""
        self._held += char
        word = self._held.lstrip()
        if word == BEGIN:
            self._held, self._state = "", self._reasoning
        elif not BEGIN.startswith(word):
            held, self._held = self._held, ""
            return held
        return None

    def _reasoning(self, char: str) -> str | None:
        self._held += char
        mark = self._held.lstrip()
        if mark == END:
            self._held, self._state = "", self._after_reasoning
        elif not self._any and mark == BEGIN:  # the model repeats the mark of the prompt
            self._held = ""
        elif not END.startswith(mark) and (self._any or not BEGIN.startswith(mark)):
            self._release(char)
        return None

    def _release(self, char: str) -> None:
        """Gives the held text as reasoning, except for a mark that begins with its last character."""
        held, self._held = self._held, ""
        if char == END[0]:
            held, self._held = held[:-1], char
        self._inside += held if self._any else held.lstrip()
        self._any = True

    def _after_reasoning(self, char: str) -> str | None:
        return None if char.isspace() else char
