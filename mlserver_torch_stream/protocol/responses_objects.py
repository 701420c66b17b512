"""Builds the response object of OpenAI's Responses API and the items of its output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlserver_torch_stream.protocol.custom_tools import ArgumentText
from mlserver_torch_stream.protocol.openai_objects import TokenCounts
from mlserver_torch_stream.protocol.spelling import JsonObject

# The request's parameters that a response repeats, with the values that it shows for absent ones.
_REPEATED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
}
_FIXED: Mapping[str, Any] = {
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}


def repeated_values(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a body that its response repeats."""
    return {key: body[key] if body.get(key) is not None else default for key, default in _REPEATED.items()}


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """Builds the object of one response in each of its states, from in progress to completed. ``created`` is in seconds
    since the epoch.
    """

    request_id: str
    model: str
    created: int
    repeated: Mapping[str, Any]

    def state(
        self,
        status: str,
        output: Sequence[JsonObject] = (),
        *,
        usage: TokenCounts | None = None,
        incomplete: str | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> JsonObject:
        """Returns the response object. ``usage`` is None until the answer has ended.

        ``incomplete`` is the reason why the answer is cut off, such as ``max_output_tokens``.
        """
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": error,
            "incomplete_details": None if incomplete is None else {"reason": incomplete},
            "model": self.model,
            "output": list(output),
            **self.repeated,
            **_FIXED,
            "usage": None if usage is None else response_usage(usage),
        }


def response_usage(counts: TokenCounts) -> JsonObject:
    """Returns the ``usage`` of a response. ``cache_write_tokens`` is always 0, and present because the SDK's type
    requires it.
    """
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }


IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


def warning_item(request_id: str, index: int, message: str) -> JsonObject:
    """Returns an item that says which part of the request is ignored. OpenAI's API has no such item."""
    return {"id": f"wr_{request_id}_{index}", "type": "warning", "status": COMPLETED, "message": message}


class OutputItem(ABC):
    """One output item whose content arrives in pieces. ``index`` is its position in the output.

    The messages that its methods return have no ``sequence_number`` yet.
    """

    prefix: str  # the beginning of the item's id

    def __init__(self, request_id: str, index: int) -> None:
        self.id = f"{self.prefix}_{request_id}_{index}"
        self._index = index
        self._pieces: list[str] = []

    def begin(self) -> list[JsonObject]:
        """Returns the messages that add the item to the output."""
        return [self._item_message("added", self._begun()), *self._opening()]

    def end(self, status: str) -> list[JsonObject]:
        """Returns the messages that end the item with this status."""
        return [*self._closing(), self._item_message("done", self.shown(status))]

    @abstractmethod
    def shown(self, status: str) -> JsonObject:
        """Returns the item with its content so far."""

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
    """An item whose content is one part, a text."""

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
        """Returns the item without its content."""

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
    """The text of an answer. ``logprobs`` are the entries of OpenAI's objects."""

    prefix = "msg"
    part_kind = "output_text"

    def __init__(self, request_id: str, index: int) -> None:
        super().__init__(request_id, index)
        self._logprobs: list[JsonObject] = []

    def say(self, text: str, logprobs: Sequence[JsonObject]) -> JsonObject:
        """Returns the message that carries a part of the text, with its log-probabilities."""
        self._logprobs += logprobs
        return self.delta(text, logprobs=list(logprobs))

    def _head(self, status: str) -> JsonObject:
        return {"id": self.id, "type": "message", "status": status, "role": "assistant"}

    def part(self, text: str) -> JsonObject:
        return {**super().part(text), "annotations": [], "logprobs": list(self._logprobs) if text else []}


class ReasoningItem(_TextualItem):
    """The reasoning before an answer. Its summary is always empty."""

    prefix = "rs"
    part_kind = "reasoning_text"

    def _head(self, status: str) -> JsonObject:
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "encrypted_content": None}


class CallItem(OutputItem):
    """A function call, with the id to which the result from the client refers."""

    prefix = "fc"

    kind, content, deltas = "function_call", "arguments", "function_call_arguments"

    def __init__(self, request_id: str, index: int, call_id: str, name: str, namespace: str | None = None) -> None:
        super().__init__(request_id, index)
        self._call_id, self._name = call_id, name
        self._namespace = {} if namespace is None else {"namespace": namespace}

    def delta(self, arguments: str) -> list[JsonObject]:
        """Returns the messages that carry the next piece of the call's arguments."""
        if not arguments:
            return []
        self._pieces.append(arguments)
        return [self._message(f"{self.deltas}.delta", delta=arguments)]

    def shown(self, status: str) -> JsonObject:
        return self._call(status, self._content())

    def _begun(self) -> JsonObject:
        return self._call(IN_PROGRESS, "")

    def _closing(self) -> list[JsonObject]:
        rest = self._rest()
        return [*rest, self._message(f"{self.deltas}.done", name=self._name, **{self.content: self._content()})]

    def _rest(self) -> list[JsonObject]:
        """Returns the deltas that have not been sent when the call ends."""
        return []

    def _call(self, status: str, said: str) -> JsonObject:
        return {
            "id": self.id,
            "type": self.kind,
            "status": status,
            "call_id": self._call_id,
            **self._namespace,
            "name": self._name,
            self.content: said,
        }


class CustomCallItem(CallItem):
    """A call of a custom tool, whose input is a text."""

    prefix = "ctc"
    kind, content, deltas = "custom_tool_call", "input", "custom_tool_call_input"

    def __init__(self, request_id: str, index: int, call_id: str, name: str, namespace: str | None = None) -> None:
        super().__init__(request_id, index, call_id, name, namespace)
        self._input = ArgumentText()

    def delta(self, arguments: str) -> list[JsonObject]:
        return super().delta(self._input.push(arguments))

    def _rest(self) -> list[JsonObject]:
        return super().delta(self._input.flush())
