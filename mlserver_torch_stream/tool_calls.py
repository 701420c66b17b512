"""Defines a request's choice of tools, and the tool calls of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

# Characters, as ``TokenEvent.size`` counts them, that a reply adds to a piece of arguments.
_CHARACTERS_PER_DELTA = 20


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which functions an answer may call. ``strict`` contains the functions whose arguments must match their schema.

    If ``name`` is set, the answer must call this function and no other. Without ``parallel`` the answer ends with its
    first call.
    """

    required: bool = False
    name: str | None = None
    parallel: bool = True
    strict: frozenset[str] = frozenset()

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.required or self.name is not None


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of one call of a function. ``index`` numbers the calls of an answer from 0.

    The first part of a call has its ``id`` and its ``name``. The ``arguments`` of all its parts join to JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    @property
    def size(self) -> int:
        """The length in characters, as ``TokenEvent`` counts it."""
        return _CHARACTERS_PER_DELTA + len(self.id or "") + len(self.name or "") + len(self.arguments)


def calls_of(objects: Iterable[Mapping[str, Any]]) -> tuple[ToolCallDelta, ...]:
    """Returns the calls of a reply, or parts of them, in OpenAI's shape. Whole calls have no index."""
    return tuple(
        ToolCallDelta(
            each.get("index", position),
            each.get("id"),
            (each.get("function") or {}).get("name"),
            (each.get("function") or {}).get("arguments") or "",
        )
        for position, each in enumerate(objects)
    )


def join_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Returns the parts of an answer's calls in order, and merges neighbouring parts of the same call."""
    joined: list[ToolCallDelta] = []
    for delta in deltas:
        if joined and joined[-1].index == delta.index:
            joined[-1] = replace(joined[-1], arguments=joined[-1].arguments + delta.arguments)
        else:
            joined.append(delta)
    return tuple(joined)
