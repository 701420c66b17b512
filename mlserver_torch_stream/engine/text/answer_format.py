"""Describes how an answer is divided into reasoning, text and tool calls, and defines the parsers of these parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mlserver_torch_stream.tool_calls import ToolCallDelta
from mlserver_torch_stream.types import Constraint, ReasoningMarks


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


Part = Reasoning | ToolCallDelta | str
"""A ``str`` is a piece of the answer's text."""


class CallParser(Protocol):
    """Finds the tool calls in an answer. The joined parts do not depend on how the text was cut into pieces."""

    @property
    def called(self) -> int:
        """The number of calls that have begun."""

    @property
    def broken(self) -> bool:
        """Whether a call has begun but is not complete."""

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, so that further text is ignored."""

    @property
    def reasons(self) -> bool:
        """Whether the next text is reasoning."""

    def push(self, text: str) -> list[Part]:
        """Adds the next text of the answer, and returns the parts that no further text can change."""

    def flush(self) -> list[Part]:
        """Ends the answer, and returns the text that was still held back."""


def joined(parts: Sequence[Part]) -> list[Part]:
    """Removes empty texts from the parts, and joins neighbours of the same kind. Calls are not changed."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, str) and isinstance(last, str):
            result[-1] = last + part
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + part.text)
        elif part != "" and part != Reasoning(""):
            result.append(part)
    return result


def short(part: Part, most: int) -> Iterator[Part]:
    """Yields the part in pieces, each of which counts for at most ``most`` characters of an event."""
    if isinstance(part, Reasoning):
        for start in range(0, len(part.text), most // 2):
            yield Reasoning(part.text[start : start + most // 2])
    elif isinstance(part, str):
        for start in range(0, len(part), most):
            yield part[start : start + most]
    else:
        yield replace(part, arguments=part.arguments[:most])
        for start in range(most, len(part.arguments), most):
            yield ToolCallDelta(part.index, arguments=part.arguments[start : start + most])


BEGIN, END = "<think>", "</think>"


class ReasoningParser:
    """Separates the reasoning from the answer. Drops whitespace around the reasoning and before the answer.

    ``begun`` means that the prompt already contains the beginning of the reasoning.
    """

    def __init__(self, *, begun: bool) -> None:
        self._state: Callable[[str], str | None] = self._reasoning if begun else self._start
        self._held = ""  # whitespace, then the beginning of a mark
        self._inside = ""  # reasoning that ``push`` returns next
        self._any = False  # True once there is reasoning that is not whitespace
        self.over = False  # the reasoning has ended, or there is none

    @property
    def reasons(self) -> bool:
        return not self.over and self._state == self._reasoning

    def push(self, text: str) -> tuple[list[Part], str]:
        """Returns the reasoning, and the text of the answer that follows the reasoning."""
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
        """The state before the first word."""
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
        """Returns the held-back text, as reasoning, except its last character if a mark may begin with it."""
        held, self._held = self._held, ""
        if char == END[0]:
            held, self._held = held[:-1], char
        self._inside += held if self._any else held.lstrip()
        self._any = True

    def _after_reasoning(self, char: str) -> str | None:
        return None if char.isspace() else char


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Describes how an answer is divided into reasoning, text and calls.

    ``reasoning`` and ``calls`` create the parsers of answers that may have these parts.

    If the tokenizer declares how answers are divided, the parser of ``calls`` finds all parts. ``marks`` are the
    special tokens whose text the parsers need. The text and the calls must match ``constraint``, which does not apply
    to the reasoning between ``reasoning_marks``.
    """

    reasoning: Callable[[], ReasoningParser] | None = None
    calls: Callable[[], CallParser] | None = None
    marks: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    reasoning_marks: ReasoningMarks | None = None

    @property
    def divides(self) -> bool:
        """True if the answer can have parts other than text."""
        return self.reasoning is not None or self.calls is not None

    def parser(self) -> AnswerParser:
        return AnswerParser(
            None if self.reasoning is None else self.reasoning(), None if self.calls is None else self.calls()
        )


class AnswerParser:
    """Parses the text of one sequence. The joined parts do not depend on how the text was cut into pieces."""

    def __init__(self, reasoning: ReasoningParser | None, calls: CallParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def reasons(self) -> bool:
        """True if the next token belongs to the reasoning."""
        if self._calls is not None and self._calls.reasons:
            return True
        return self._reasoning is not None and self._reasoning.reasons

    @property
    def called(self) -> bool:
        """True if the answer has calls and all of them are complete."""
        return self._calls is not None and self._calls.called > 0 and not self._calls.broken

    @property
    def ended(self) -> bool:
        """True if the answer may have only one call and this call is complete."""
        return self._calls is not None and self._calls.ended

    def push(self, text: str) -> list[Part]:
        """Adds the next text of the answer, and returns the parts that no further text can change."""
        parts: list[Part] = []
        if self._reasoning is not None:
            parts, text = self._reasoning.push(text)
        return parts + self._answer(text)

    def flush(self) -> list[Part]:
        """Ends the answer, and returns the text that was still held back."""
        parts: list[Part] = []
        if self._reasoning is not None:
            parts, text = self._reasoning.flush()
            parts += self._answer(text)
        return parts + ([] if self._calls is None else self._calls.flush())

    def _answer(self, text: str) -> list[Part]:
        if not text:
            return []
        return [text] if self._calls is None else self._calls.push(text)
