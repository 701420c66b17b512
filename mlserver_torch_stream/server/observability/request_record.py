"""Defines the record of one request, from which its log line and its span are written.

Knows nothing of their formats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mlserver_torch_stream.types import FinishReason, GenerationRequest, Prompt

OK = 200
CLIENT_CLOSED_REQUEST = 499  # nginx's status for the log: the client is not there to receive one


class EndpointKind(str, Enum):
    """The transport of a request, and whether its reply streams."""

    REST_UNARY = "rest-unary"
    REST_STREAM = "rest-stream"
    GRPC_UNARY = "grpc-unary"
    GRPC_STREAM = "grpc-stream"

    @property
    def streams(self) -> bool:
        return self in (EndpointKind.REST_STREAM, EndpointKind.GRPC_STREAM)


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds since the request's start; None: the request ended before."""

    request_id: str
    model: str
    version: str
    endpoint: EndpointKind
    request: GenerationRequest | None = None  # None: it could not be decoded
    prompts: tuple[Prompt, ...] = ()  # complete, also if the client sent them in pieces
    prompt_tokens: int = 0
    completion_tokens: int = 0  # in events that were sent
    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float = 0.0
    reasons: list[FinishReason] = field(default_factory=list)  # of the sequences that have ended
    texts: dict[int, list[str]] = field(default_factory=dict)  # by sequence; kept only if the log shows prompts
    error: BaseException | None = None
    status: int = OK  # REST's, also for requests over gRPC

    @property
    def sequences(self) -> int:
        return len(self.request.prompts) * self.request.sampling.n if self.request is not None else 0

    @property
    def client_disconnected(self) -> bool:
        return self.status == CLIENT_CLOSED_REQUEST
