"""Reads and writes the V2 protocol: named input and output tensors, over REST and as MLServer's gRPC messages.

A response is the object that REST writes as JSON; for gRPC it is converted to MLServer's response class. An event of
size ``MAX_PER_EVENT`` makes a line of less than 48 KiB, because everything else in a response takes only a few KiB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from mlserver.types import InferenceRequest, InferenceResponse, MetadataTensor, Parameters
from mlserver.utils import insert_headers

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.parameters import PARAMETERS
from mlserver_torch_stream.protocol.spelling import (
    JsonObject,
    PostedBody,
    ReplyContext,
    Spelling,
    StreamEncoder,
    StreamProgress,
    WholeEncoder,
    WholeReply,
    event_values,
    head,
    shown_values,
    totals,
)
from mlserver_torch_stream.protocol.v2_names import MESSAGE_TENSORS
from mlserver_torch_stream.protocol.v2_request import decode_request, validated
from mlserver_torch_stream.protocol.v2_tensors import (
    MAX_PARAMETERS,
    MAX_TENSORS,
    BinaryOutputs,
    attach_binary,
    check_count,
    with_elements,
)
from mlserver_torch_stream.protocol.values import most_elements
from mlserver_torch_stream.types import GenerationRequest, ModelInfo, TokenEvent

_DATATYPES = {**names.OUTPUT_DATATYPES, **names.CHAT_OUTPUT_DATATYPES}


def output(name: str, data: list[Any], shape: list[int] | None = None) -> JsonObject:
    """Returns an output tensor.

    ``data`` are its elements, which are str for BYTES; the default shape is their count.
    """
    return {"name": name, "shape": shape or [len(data)], "datatype": _DATATYPES[name], "data": data}


def as_response(body: JsonObject) -> InferenceResponse:
    """Converts a response to MLServer's response class. Elements of BYTES become bytes, and ``error`` is left out.

    The object is created by pydantic's validation, which is the fastest way because it runs in Rust.
    """
    message = {**body, "outputs": [_as_bytes(tensor) for tensor in body["outputs"]]}
    message.pop("error", None)
    return InferenceResponse.model_validate(message)


def _as_bytes(tensor: JsonObject) -> JsonObject:
    if tensor["datatype"] != "BYTES":
        return tensor
    return {**tensor, "data": [each.encode() if isinstance(each, str) else each for each in tensor["data"]]}


_AS_JSON = frozenset({names.LOGPROBS, names.PROMPT_LOGPROBS, names.TOOL_CALLS})  # elements are JSON lists as text


class StreamReply:
    """Writes the responses of one streamed request, one for each event."""

    def __init__(self, request: GenerationRequest, context: ReplyContext) -> None:
        self._request_id = request.request_id
        self._head = head(context, request.request_id)
        self._progress = StreamProgress(request, context.request_index)
        self._shown = shown_values(request.reply)
        self._headers = dict(context.headers)  # empty after the first response, which has them

    def event(self, event: TokenEvent) -> Sequence[JsonObject]:
        """Returns the response of one event.

        If a sequence failed, the final response has ``error`` in addition to its outputs.
        """
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
        """Returns None: a V2 stream ends with its last response."""

    def _tensors(self, event: TokenEvent, final: bool) -> list[JsonObject]:
        tensors = []
        for name, value in event_values(event, self._shown).items():
            data = value if name == names.TOKEN_IDS else [_json(value) if name in _AS_JSON else value]
            tensors.append(output(name, data))
        return tensors


class UnaryReply(WholeReply):
    """Writes the one response to a request that is not streamed."""

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
        """Returns the shape of ``token_ids``: [S] for one sequence, [B·n, longest S] for several."""
        sequences = len(self._request.prompts) * self._request.sampling.n
        return [count] if sequences == 1 else [sequences, count // sequences]


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


class V2Tensors(Spelling):
    """Reads and writes V2. ``outputs`` are the output tensors that a request may name."""

    outputs = frozenset(names.OUTPUT_DATATYPES)

    def decode(self, posted: PostedBody, info: ModelInfo, *, streaming: bool, request_id: str) -> GenerationRequest:
        payload = read_posted_request(posted, most_elements(info.max_model_len), streaming=streaming)
        return self.decode_message(payload, info, streaming=streaming, request_id=request_id)

    def decode_message(
        self, payload: InferenceRequest, info: ModelInfo, *, streaming: bool, request_id: str
    ) -> GenerationRequest:
        """Decodes a request of MLServer's request class, which is how gRPC requests arrive. Raises InvalidInput."""
        return decode_request(payload, info, streaming=streaming, request_id=request_id, outputs=self.outputs)

    def stream(self, request: GenerationRequest, context: ReplyContext) -> StreamEncoder:
        return StreamReply(request, context)

    def whole(self, request: GenerationRequest, context: ReplyContext) -> WholeEncoder:
        return UnaryReply(request, context)

    def attach(self, posted: PostedBody, body: JsonObject) -> tuple[JsonObject, bytes | None]:
        return attach_binary(body, BinaryOutputs.wanted_by(posted.json))


V2 = V2Tensors()


def read_posted_request(posted: PostedBody, most: int, *, streaming: bool) -> InferenceRequest:
    """Converts the body of a V2 REST request to MLServer's request class. ``most`` bounds the elements of a tensor.

    Raises InvalidInput.
    """
    asked = BinaryOutputs.wanted_by(posted.json).asked
    if streaming and asked:
        raise InvalidInput(asked, "a stream of events has no binary outputs; use an endpoint that answers once")
    _check_counts(posted.json)
    payload = validated(with_elements(posted.json, posted.raw, most))
    insert_headers(payload, dict(posted.headers))
    return payload


def _check_counts(body: Mapping[str, Any]) -> None:
    """Raises InvalidInput if the body has too many tensors or parameters. MLServer's request class would be slow for
    them.
    """
    holders: list[Any] = [body]
    for field in ("inputs", "outputs"):
        tensors = body.get(field)
        if isinstance(tensors, list):
            check_count(field, len(tensors), MAX_TENSORS, "tensors")
            holders += tensors
    parameters = [holder.get("parameters") for holder in holders if isinstance(holder, dict)]
    count = sum(len(each) for each in parameters if isinstance(each, dict))
    check_count("parameters", count, MAX_PARAMETERS, "entries, with those of all tensors")


def input_metadata() -> list[MetadataTensor]:
    """Returns the metadata of every input tensor, under its canonical name; ``aliases`` are its other names."""
    tensors = [
        _tensor(names.TEXT_INPUT, "BYTES", -1, names.TEXT_ALIASES),
        _tensor(names.INPUT_IDS, "INT64", -1),
        _tensor(names.MESSAGES, "BYTES", 1),
        *(_tensor(name, "BYTES", -1) for name in MESSAGE_TENSORS),
        _tensor(names.TOOLS, "BYTES", -1),
        _tensor(names.SAMPLING_PARAMETERS, "BYTES", 1),
    ]
    for parameter in PARAMETERS:
        if parameter.tensor is not None:
            size = -1 if parameter.several else 1
            tensors.append(_tensor(parameter.name, parameter.tensor, size, parameter.aliases))
    return tensors


def output_metadata() -> list[MetadataTensor]:
    """Returns the metadata of every output tensor, including those that only some replies have."""
    outputs = {**names.OUTPUT_DATATYPES, **names.CHAT_OUTPUT_DATATYPES}
    return [_tensor(name, datatype, 1 if name == names.OUTPUT_ALL else -1) for name, datatype in outputs.items()]


def _tensor(name: str, datatype: str, size: int, aliases: tuple[str, ...] = ()) -> MetadataTensor:
    parameters = Parameters.model_validate({"aliases": ",".join(aliases)}) if aliases else None
    return MetadataTensor.model_validate(
        {"name": name, "datatype": datatype, "shape": [size], "parameters": parameters}
    )
