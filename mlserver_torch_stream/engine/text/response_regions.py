"""Cuts an answer into the regions that a tokenizer's ``response_template`` declares, with transformers' parser of it.

Knows nothing of what the regions mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate


class RegionSink(Protocol):
    """Receives the regions in the order of the text. ``raw`` is what begins or ends a region in the text."""

    def opened(self, field: str, raw: str, captures: Mapping[str, str]) -> None: ...

    def said(self, field: str, text: str) -> None: ...

    def closed(self, field: str, raw: str) -> None:
        """A region has ended. ``raw`` is empty if the answer ended within the region."""


class RegionReader(ResponseParser):  # type: ignore[misc]  # transformers has no types
    """Tells a sink of the regions as they come, where transformers' parser makes values of whole ones.

    The text is read character by character: transformers' parser decides about some patterns by the text at hand.
    ``prefix`` is what the prompt has written of the answer.
    """

    def __init__(self, template: ResponseTemplate, prefix: str, sink: RegionSink) -> None:
        self._sink = sink
        self._told = 0  # characters that the sink knows
        super().__init__(template, prefix)

    @property
    def field(self) -> str:
        """The region to which the next text belongs."""
        return str(self._current)

    def push(self, text: str) -> None:
        for char in text:
            self.feed(char)

    def flush(self) -> None:
        """The answer ends."""
        self._process([], eos=True)

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        self._opened = True
        self._told = self._pos + len(text)
        self._sink.said(self.field, text)

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        super()._open_explicit(events, field, m)
        self._told = self._pos
        self._sink.opened(field.name, m.group(), self._captures)

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        if self._current != self._implicit_name:
            self._sink.closed(self.field, self._buffer[self._told : self._pos])
        self._reset_to_implicit()
