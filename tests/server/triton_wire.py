"""Triton's framing by hand: methods by name, and message fields by number.

Uses neither the server's code for it nor a client library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.unknown_fields import UnknownFieldSet
from mlserver.grpc import dataplane_pb2 as pb

from tests.server import v2

_SERVICE = "/inference.GRPCInferenceService/"


@dataclass(frozen=True)
class Streamed:
    """One ``ModelStreamInferResponse``."""

    error: str
    reply: v2.Reply

    @property
    def final(self) -> bool:
        return bool(self.reply.parameters.get("triton_final_response"))


def fields(raw: bytes) -> dict[int, list[Any]]:
    """Returns the fields of any message by their numbers."""
    found: dict[int, list[Any]] = {}
    for field in UnknownFieldSet(pb.ServerLiveRequest.FromString(raw)):
        found.setdefault(field.field_number, []).append(field.data)
    return found


def streamed(raw: bytes) -> Streamed:
    parts = fields(raw)
    (error,) = parts.get(1, [b""])
    (response,) = parts.get(2, [b""])
    return Streamed(error.decode(), v2.grpc_reply(pb.ModelInferResponse.FromString(response)))


def unary(channel: grpc.Channel, method: str, request: Any = b"", **options: Any) -> bytes:
    """``request`` is a message or its bytes."""
    raw = request if isinstance(request, bytes) else request.SerializeToString()
    call = channel.unary_unary(_SERVICE + method)
    return bytes(call(raw, timeout=v2.TIMEOUT_S, **options))


def infer(channel: grpc.Channel, request: pb.ModelInferRequest, **options: Any) -> v2.Reply:
    return v2.grpc_reply(pb.ModelInferResponse.FromString(unary(channel, "ModelInfer", request, **options)))


def stream(
    channel: grpc.Channel,
    requests: Iterable[pb.ModelInferRequest | bytes],
    timeout: float = v2.TIMEOUT_S,
    metadata: tuple[tuple[str, str], ...] = (),
) -> Any:
    """Starts the call and returns it; its items are bytes."""
    raw: Iterator[bytes] = (each if isinstance(each, bytes) else each.SerializeToString() for each in requests)
    return channel.stream_stream(f"{_SERVICE}ModelStreamInfer")(raw, timeout=timeout, metadata=metadata)


def replies(channel: grpc.Channel, *requests: pb.ModelInferRequest | bytes) -> list[Streamed]:
    return [streamed(raw) for raw in stream(channel, requests)]


def by_id(found: Iterable[Streamed]) -> dict[str, list[Streamed]]:
    sorted_out: dict[str, list[Streamed]] = {}
    for each in found:
        sorted_out.setdefault(each.reply.id, []).append(each)
    return sorted_out
