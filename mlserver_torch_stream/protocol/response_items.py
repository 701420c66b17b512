"""Builds the items of a response of OpenAI's Responses API, and the messages of a stream that build them up.

Knows nothing of the response around them, nor of token events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from mlserver_torch_stream.protocol.spelling import JsonObject

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


class OutputItem(ABC):
    """One item while it grows. ``index``: its place in the output. Messages have no ``sequence_number`` yet."""

    prefix: str  # of its id

    def __init__(self, request_id: str, index: int) -> None:
        self.id = f"{self.prefix}_{request_id}_{index}"
        self._index = index
        self._pieces: list[str] = []

    def begin(self) -> list[JsonObject]:
        return [self._item_message("added", self._begun()), *self._opening()]

    def end(self, status: str) -> list[JsonObject]:
        return [*self._closing(), self._item_message("done", self.shown(status))]

    @abstractmethod
    def shown(self, status: str) -> JsonObject:
        """The item with its content so far."""

    @abstractmethod
    def _begun(self) -> JsonObject: ...

    def _opening(self) -> list[JsonObject]:
        return []

    @abstractmethod
    def _closing(self) -> list[JsonObject]: ...

    def _content(self) -> str:
        return "".join(self._pieces)

    def _item_message(self, kind: str, item: JsonObject) -> JsonObject:
        return {"type": f"response.output_item.{kind}", "output_index": self._index, "item": item}

    def _message(self, kind: str, **more: Any) -> JsonObject:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self._index, **more}


class _TextualItem(OutputItem):
    """An item whose content is one part with text."""

    part_kind: str

    def delta(self, text: str, **more: Any) -> JsonObject:
        self._pieces.append(text)
        return self._part_message(f"{self.part_kind}.delta", delta=text, **more)

    def shown(self, status: str) -> JsonObject:
        return {**self._head(status), "content": [self.part(self._content())]}

    def part(self, text: str) -> JsonObject:
        return {"type": self.part_kind, "text": text}

    @abstractmethod
    def _head(self, status: str) -> JsonObject:
        """The item without its content."""

    def _begun(self) -> JsonObject:
        return {**self._head(IN_PROGRESS), "content": []}

    def _opening(self) -> list[JsonObject]:
        return [self._part_message("content_part.added", part=self.part(""))]

    def _closing(self) -> list[JsonObject]:
        part = self.part(self._content())
        told = {key: value for key, value in part.items() if key in ("text", "logprobs")}
        return [
            self._part_message(f"{self.part_kind}.done", **told),
            self._part_message("content_part.done", part=part),
        ]

    def _part_message(self, kind: str, **more: Any) -> JsonObject:
        return self._message(kind, content_index=0, **more)


class MessageItem(_TextualItem):
    """Text. ``logprobs``: those of OpenAI's objects."""

    prefix = "msg"
    part_kind = "output_text"

    def __init__(self, request_id: str, index: int) -> None:
        super().__init__(request_id, index)
        self._logprobs: list[JsonObject] = []

    def say(self, text: str, logprobs: Sequence[JsonObject]) -> JsonObject:
        self._logprobs += logprobs
        return self.delta(text, logprobs=list(logprobs))

    def _head(self, status: str) -> JsonObject:
        return {"id": self.id, "type": "message", "status": status, "role": "assistant"}

    def part(self, text: str) -> JsonObject:
        return {**super().part(text), "annotations": [], "logprobs": list(self._logprobs) if text else []}


class ReasoningItem(_TextualItem):
    """Reasoning. Its summary is always empty."""

    prefix = "rs"
    part_kind = "reasoning_text"

    def _head(self, status: str) -> JsonObject:
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "encrypted_content": None}


class CallItem(OutputItem):
    """A call of a function, with the id by which the client answers it."""

    prefix = "fc"

    def __init__(self, request_id: str, index: int, call_id: str, name: str) -> None:
        super().__init__(request_id, index)
        self._call_id, self._name = call_id, name

    def delta(self, arguments: str) -> JsonObject:
        self._pieces.append(arguments)
        return self._message("function_call_arguments.delta", delta=arguments)

    def shown(self, status: str) -> JsonObject:
        return self._call(status, self._content())

    def _begun(self) -> JsonObject:
        return self._call(IN_PROGRESS, "")

    def _closing(self) -> list[JsonObject]:
        return [self._message("function_call_arguments.done", name=self._name, arguments=self._content())]

    def _call(self, status: str, arguments: str) -> JsonObject:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": arguments,
        }
