"""Streams generations from a server: in the V2 protocol over REST and gRPC."""

from mlserver_torch_stream.client.call import (
    ClientError,
    ConnectionFailed,
    Delta,
    GenerationError,
    Logprob,
    RequestRefused,
    RequestUsage,
    StreamBroken,
)
from mlserver_torch_stream.client.client import AsyncClient, Client, astream, stream
from mlserver_torch_stream.client.http_transport import EventParser
from mlserver_torch_stream.tool_calls import ToolCallDelta

__all__ = [
    "AsyncClient",
    "Client",
    "ClientError",
    "ConnectionFailed",
    "Delta",
    "EventParser",
    "GenerationError",
    "Logprob",
    "RequestRefused",
    "RequestUsage",
    "StreamBroken",
    "ToolCallDelta",
    "astream",
    "stream",
]
