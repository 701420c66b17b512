"""Defines the parts that a parser finds in an answer: pieces of reasoning, of text, and of tool calls.

Knows nothing of tokens or events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mlserver_torch_stream.tool_calls import ToolCallDelta


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


Part = Reasoning | ToolCallDelta | str
"""A ``str`` is a piece of the answer's text."""


class CallParser(Protocol):
    """Finds the tool calls in an answer. How its text is cut changes only the pieces that come out."""

    @property
    def called(self) -> int:
        """The number of calls that have begun."""

    @property
    def broken(self) -> bool:
        """Whether a call that had begun did not end."""

    @property
    def ended(self) -> bool:
        """Whether no further text counts."""

    @property
    def reasons(self) -> bool:
        """Whether the next text is reasoning."""

    def push(self, text: str) -> list[Part]: ...

    def flush(self) -> list[Part]:
        """Returns the text that is still held back, when the answer ends."""


def joined(parts: Sequence[Part]) -> list[Part]:
    """Returns the parts without empty texts, and neighbours of the same kind as one; calls stay as they are."""
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
    """Yields the part as pieces whose events count at most ``most`` characters."""
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
