"""Says how one answer is divided into reasoning, text and tool calls, and makes the parser that divides it.

Knows nothing of chat templates, which ``chat_format`` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlserver_torch_stream.engine.text.answer_parts import CallParser, Part
from mlserver_torch_stream.engine.text.reasoning import ReasoningParser
from mlserver_torch_stream.engine.text.reasoning_marks import ReasoningMarks
from mlserver_torch_stream.types import Constraint


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """``reasoning`` and ``calls`` make the parsers of an answer that may have such parts.

    Where a tokenizer declares how answers are divided, ``calls`` finds all the parts. The text of the special tokens
    ``marks`` is passed to the parsers. The text and the calls must match ``constraint``, after a reasoning with the
    marks ``reasoning_marks``.
    """

    reasoning: Callable[[], ReasoningParser] | None = None
    calls: Callable[[], CallParser] | None = None
    marks: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    reasoning_marks: ReasoningMarks | None = None

    @property
    def divides(self) -> bool:
        """Whether the answer can be anything but text."""
        return self.reasoning is not None or self.calls is not None

    def parser(self) -> AnswerParser:
        return AnswerParser(
            None if self.reasoning is None else self.reasoning(), None if self.calls is None else self.calls()
        )


class AnswerParser:
    """Parses the text of one sequence. How the text is cut changes only the pieces that come out."""

    def __init__(self, reasoning: ReasoningParser | None, calls: CallParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def reasons(self) -> bool:
        """Whether the next token belongs to the reasoning."""
        if self._calls is not None and self._calls.reasons:
            return True
        return self._reasoning is not None and self._reasoning.reasons

    @property
    def called(self) -> bool:
        """Whether the answer has calls, all of them complete."""
        return self._calls is not None and self._calls.called > 0 and not self._calls.broken

    @property
    def ended(self) -> bool:
        """Whether the answer may have one call only, and has it."""
        return self._calls is not None and self._calls.ended

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        if self._reasoning is not None:
            parts, text = self._reasoning.push(text)
        return parts + self._answer(text)

    def flush(self) -> list[Part]:
        """Returns the text that is still held back, when the answer ends."""
        parts: list[Part] = []
        if self._reasoning is not None:
            parts, text = self._reasoning.flush()
            parts += self._answer(text)
        return parts + ([] if self._calls is None else self._calls.flush())

    def _answer(self, text: str) -> list[Part]:
        if not text:
            return []
        return [text] if self._calls is None else self._calls.push(text)
