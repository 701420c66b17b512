"""The V2 spelling: named tensors in, named tensors out, over REST and as MLServer's gRPC messages.

Knows nothing of the transport beyond its two forms of a request: a posted JSON object and MLServer's model of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlserver.types import InferenceRequest
from mlserver.utils import insert_headers

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.spelling import (
    JsonObject,
    PostedBody,
    ReplyContext,
    Spelling,
    StreamEncoder,
    WholeEncoder,
)
from mlserver_torch_stream.protocol.v2_binary import BinaryOutputs, attach_binary, with_elements
from mlserver_torch_stream.protocol.v2_reply import StreamReply, UnaryReply
from mlserver_torch_stream.protocol.v2_request import decode_request, validated
from mlserver_torch_stream.protocol.v2_tensors import MAX_PARAMETERS, MAX_TENSORS, check_count
from mlserver_torch_stream.protocol.values import most_elements
from mlserver_torch_stream.types import GenerationRequest, ModelInfo


class V2Tensors(Spelling):
    """``outputs``: the output tensors that a request may name."""

    outputs = frozenset(names.OUTPUT_DATATYPES)

    def decode(self, posted: PostedBody, info: ModelInfo, *, streaming: bool, request_id: str) -> GenerationRequest:
        payload = read_posted_request(posted, most_elements(info.max_model_len), streaming=streaming)
        return self.decode_message(payload, info, streaming=streaming, request_id=request_id)

    def decode_message(
        self, payload: InferenceRequest, info: ModelInfo, *, streaming: bool, request_id: str
    ) -> GenerationRequest:
        """Decodes MLServer's model of a request, as gRPC gives it. Raises InvalidInput."""
        return decode_request(payload, info, streaming=streaming, request_id=request_id, outputs=self.outputs)

    def stream(self, request: GenerationRequest, context: ReplyContext) -> StreamEncoder:
        return StreamReply(request, context)

    def whole(self, request: GenerationRequest, context: ReplyContext) -> WholeEncoder:
        return UnaryReply(request, context)

    def attach(self, posted: PostedBody, body: JsonObject) -> tuple[JsonObject, bytes | None]:
        return attach_binary(body, BinaryOutputs.wanted_by(posted.json))


V2 = V2Tensors()


def read_posted_request(posted: PostedBody, most: int, *, streaming: bool) -> InferenceRequest:
    """MLServer's model of a V2 request over REST. ``most``: elements that a tensor may have. Raises InvalidInput."""
    asked = BinaryOutputs.wanted_by(posted.json).asked
    if streaming and asked:
        raise InvalidInput(asked, "a stream of events has no binary outputs; use an endpoint that answers once")
    _check_counts(posted.json)
    payload = validated(with_elements(posted.json, posted.raw, most))
    insert_headers(payload, dict(posted.headers))
    return payload


def _check_counts(body: Mapping[str, Any]) -> None:
    """Raises InvalidInput for more tensors or parameters than MLServer's model of a request should be made of."""
    holders: list[Any] = [body]
    for field in ("inputs", "outputs"):
        tensors = body.get(field)
        if isinstance(tensors, list):
            check_count(field, len(tensors), MAX_TENSORS, "tensors")
            holders += tensors
    parameters = [holder.get("parameters") for holder in holders if isinstance(holder, dict)]
    count = sum(len(each) for each in parameters if isinstance(each, dict))
    check_count("parameters", count, MAX_PARAMETERS, "entries, with those of all tensors")
