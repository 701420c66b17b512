"""Streams generations from a server: in the V2 protocol over REST and gRPC, and in OpenAI's API.

Knows nothing of how servers generate, and imports neither torch nor MLServer.
"""

from mlserver_torch_stream.client.client import AsyncClient, Client, astream, stream
from mlserver_torch_stream.client.client_errors import (
    ClientError,
    ConnectionFailed,
    GenerationError,
    RequestRefused,
    StreamBroken,
)
from mlserver_torch_stream.client.deltas import Delta, Logprob, RequestUsage
from mlserver_torch_stream.client.event_parser import EventParser
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
