"""One PredictionsRequest: reads it, and answers it by the handler's pieces or by an error.

Knows nothing of other requests on the same call, nor of how the call ends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from google.protobuf.message import DecodeError
from mlserver.handlers import DataPlane
from mlserver.logging import logger
from starlette.datastructures import Headers

from mlserver_torch_stream.errors import InvalidInput, RequestError
from mlserver_torch_stream.protocol.sequence_headers import sequence_header
from mlserver_torch_stream.protocol.v2_tensors import check_count
from mlserver_torch_stream.server.observability.request_observer import ModelRequestObservers
from mlserver_torch_stream.server.observability.request_record import EndpointKind
from mlserver_torch_stream.server.registered_models import find_accepted, is_ours, no_handler
from mlserver_torch_stream.server.rest.prediction_body import MAX_FIELDS, BodyField
from mlserver_torch_stream.server.rest.prediction_errors import MissingParameter
from mlserver_torch_stream.server.rest.prediction_head import request_id_of
from mlserver_torch_stream.server.rest.predictions import PieceReply, RunsHandler
from mlserver_torch_stream.server.rest.refusal import as_refusal
from mlserver_torch_stream.server.torchserve_grpc.call_status import status_fields
from mlserver_torch_stream.server.torchserve_grpc.inference_messages import PredictionResponse, PredictionsRequest

_TRUE = b"true"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One response. ``error``: the request has failed, and this is its last response."""

    value: bytes = b""
    sequence_id: str = ""
    error: RequestError | None = None

    def serialized(self) -> bytes:
        status = None if self.error is None else status_fields(self.error)
        message = PredictionResponse(prediction=self.value, sequence_id=self.sequence_id, status=status)
        return bytes(message.SerializeToString())


class GrpcPrediction:
    """Answers one request, once: by a response for each piece, or by a single one.

    ``in_sequence``: the request must name its sequence, or start one. ``metadata``: the handler gets it as headers.
    """

    def __init__(
        self,
        data_plane: DataPlane,
        message: bytes,
        metadata: Mapping[str, str],
        endpoint: EndpointKind,
        *,
        in_sequence: bool = False,
    ) -> None:
        self._data_plane = data_plane
        self._message = message
        self._metadata = metadata
        self._endpoint = endpoint
        self._in_sequence = in_sequence
        self._request_id = request_id_of(Headers(dict(metadata)))
        self._request: Any = PredictionsRequest()
        self._model: Any = None
        self._sequence: dict[str, str | bool] = {}
        self._reply: PieceReply | None = None

    async def whole(self) -> Prediction:
        """All pieces joined. Raises RequestError."""
        with self._refusals():
            self._read()
            async with self._data_plane._infer_contextmanager(self._request.model_name, self._version) as model:
                return self._response(await self._open(model).whole())

    async def bodies(self) -> AsyncIterator[Prediction]:
        """A response for each piece. An error is the last one."""
        try:
            async for value in self._values():
                yield self._response(value)
        except Exception as error:
            for response in self.failure(error):
                yield response

    def failure(self, error: Exception) -> Sequence[Prediction]:
        return [self._response(error=as_refusal(error))]

    def close(self) -> None:
        if self._reply is not None:
            self._reply.close()

    async def _values(self) -> AsyncIterator[bytes]:
        with self._refusals():
            self._read()
            async with (
                self._data_plane._infer_contextmanager(self._request.model_name, self._version) as model,
                aclosing(self._open(model).pieces()) as pieces,
            ):
                async for piece in pieces:
                    yield piece.value

    @property
    def _version(self) -> str | None:
        return self._request.model_version or None

    def _read(self) -> None:
        """Raises RequestError."""
        try:
            self._request.ParseFromString(self._message)
        except DecodeError as error:
            raise InvalidInput("request", f"its bytes are not a PredictionsRequest: {error}") from None
        check_count("input", len(self._request.input), MAX_FIELDS, "entries")
        name = self._request.model_name
        if not name:
            raise MissingParameter("model_name")
        self._model = find_accepted(self._data_plane._model_registry, name, self._version, is_ours)
        if not hasattr(self._model, "open_prediction"):
            raise no_handler(name)
        self._sequence = self._read_sequence()

    def _read_sequence(self) -> dict[str, str | bool]:
        """V2's parameters of the sequence. Its start and its end are entries of the input, as TorchServe names them."""
        sequence_id = self._request.sequence_id
        if not self._in_sequence:
            return {"sequence_id": sequence_id} if sequence_id else {}
        given = {entry.key.lower(): entry.value for entry in self._request.input}
        flags = {
            name: given.get(sequence_header(name), b"").lower() == _TRUE for name in ("sequence_start", "sequence_end")
        }
        if not sequence_id and not flags["sequence_start"]:
            raise MissingParameter("sequenceId")
        return {"sequence_id": sequence_id or f"ts-seq-{uuid4()}", **flags}

    def _open(self, model: RunsHandler) -> PieceReply:
        entries = {entry.key: entry.value for entry in self._request.input}  # of a key that comes twice the last counts
        fields = [BodyField(name, "", value) for name, value in entries.items()]
        headers, request_id = self._metadata, self._request_id
        self._reply = model.open_prediction(fields, headers, request_id, self._endpoint, self._sequence)
        return self._reply

    def _response(self, value: bytes = b"", error: RequestError | None = None) -> Prediction:
        sequence_id = str(self._sequence.get("sequence_id", "")) if self._in_sequence else ""
        return Prediction(value, sequence_id, error)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Records a refusal, unless the observer of an opened request has done so."""
        try:
            yield
        except Exception as error:
            if self._reply is None and self._model is not None:
                observers = ModelRequestObservers(self._model.name, self._model.version, self._endpoint)
                observers.refused(self._request_id, error)
            elif self._reply is None:
                message = as_refusal(error).message
                logger.info(f"A request to TorchServe's gRPC service was refused: {message!r}")  # a name may have lines
            raise
