"""What is known of one request at its end, for its log line and its span.

Knows nothing of who reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mlserver_torch_stream.types import FinishReason, GenerationRequest, Prompt

OK = 200
CLIENT_CLOSED_REQUEST = 499  # nginx's; it goes to logs only, as nobody is there to see it


class EndpointKind(str, Enum):
    """Which way a request came in."""

    REST_UNARY = "rest-unary"
    REST_STREAM = "rest-stream"
    GRPC_UNARY = "grpc-unary"
    GRPC_STREAM = "grpc-stream"

    @property
    def streams(self) -> bool:
        return self in (EndpointKind.REST_STREAM, EndpointKind.GRPC_STREAM)


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds since the request's start; None: it did not come to that."""

    request_id: str
    model: str
    version: str
    endpoint: EndpointKind
    request: GenerationRequest | None = None  # None: it could not be decoded
    prompts: tuple[Prompt, ...] = ()  # whole, although they may have come in pieces
    prompt_tokens: int = 0
    completion_tokens: int = 0  # that the reader was given
    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float = 0.0
    reasons: list[FinishReason] = field(default_factory=list)  # of the sequences that ended
    texts: dict[int, list[str]] = field(default_factory=dict)  # by sequence; kept only for who may log them
    error: BaseException | None = None
    status: int = OK  # REST's, whichever door it came through

    @property
    def sequences(self) -> int:
        return len(self.request.prompts) * self.request.sampling.n if self.request is not None else 0

    @property
    def client_disconnected(self) -> bool:
        return self.status == CLIENT_CLOSED_REQUEST
