"""Writes token events as V2 responses: one each for a stream, or all of them collected into one.

An event of ``MOST_PER_EVENT`` is a line of less than 48 KiB: nothing else in a response grows beyond a few KiB. Knows
nothing of where events are from, nor of the transport of the responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.reply_values import StreamProgress, WholeReply, event_values, shown_values, totals
from mlserver_torch_stream.protocol.spelling import JsonObject, ReplyContext
from mlserver_torch_stream.protocol.v2_outputs import head, output
from mlserver_torch_stream.types import GenerationRequest, TokenEvent

_AS_JSON = frozenset({names.LOGPROBS, names.TOOL_CALLS})  # an element is a JSON list


class StreamReply:
    """The responses of one streamed request: every event of its sequences, in order, becomes one of them."""

    def __init__(self, request: GenerationRequest, context: ReplyContext) -> None:
        self._request_id = request.request_id
        self._head = head(context, request.request_id)
        self._progress = StreamProgress(request, context.request_index)
        self._shown = shown_values(request.reply)
        self._headers = dict(context.headers)  # until the first response has taken them

    def event(self, event: TokenEvent) -> Sequence[JsonObject]:
        """The responses of one event. The final response has ``error`` beside its outputs if a sequence failed."""
        parameters: JsonObject = {"request_id": self._request_id}
        final = self._progress.describe(event, parameters)
        if self._headers:
            parameters["headers"], self._headers = self._headers, {}
        body = {**self._head, "parameters": parameters, "outputs": self._tensors(event, final)}
        if final and self._progress.error:
            body["error"] = self._progress.error
        return (body,)

    def fail(self, error: Exception) -> Sequence[JsonObject]:
        return [body for ending in self._progress.endings(error) for body in self.event(ending)]

    def end(self) -> None:
        """None: the last response is the end of the stream."""

    def _tensors(self, event: TokenEvent, final: bool) -> list[JsonObject]:
        tensors = []
        for name, value in event_values(event, self._shown).items():
            data = value if name == names.TOKEN_IDS else [_json(value) if name in _AS_JSON else value]
            tensors.append(output(name, data))
        return tensors


class UnaryReply(WholeReply):
    """The one response of a request that is answered as a whole."""

    def body(self) -> JsonObject:
        context, request_id = self._context, self._request.request_id
        parameters: JsonObject = {
            "request_id": request_id,
            "chunk_index": 0,
            "triton_final_response": True,
            **totals(self.usage),
        }
        if context.request_index is not None:
            parameters["request_index"] = context.request_index
        if context.headers:
            parameters["headers"] = dict(context.headers)
        return {**head(context, request_id), "parameters": parameters, "outputs": self._tensors()}

    def _tensors(self) -> list[JsonObject]:
        tensors = []
        for name, data in self.values(shown_values(self._request.reply)).items():
            if name in _AS_JSON:
                data = [_json(entries) for entries in data]
            tensors.append(output(name, data, self._ids_shape(len(data)) if name == names.TOKEN_IDS else None))
        return tensors

    def _ids_shape(self, count: int) -> list[int]:
        """[S] for one sequence; [B·n, longest] for several."""
        sequences = len(self._request.prompts) * self._request.sampling.n
        return [count] if sequences == 1 else [sequences, count // sequences]


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
