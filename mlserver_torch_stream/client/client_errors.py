"""The ways in which a call of the client fails.

Knows nothing of transports.
"""

from __future__ import annotations


class ClientError(Exception):
    """The generation failed. The message has the reason that the server or the network gave.

    ``status`` is the server's HTTP status, over gRPC the one that stands for its code; None where the server sent none.
    ``retry_after`` is in seconds, where the server said it.
    """

    def __init__(self, message: str, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class ConnectionFailed(ClientError):
    """No server answers at this address."""


class RequestRefused(ClientError):
    """The server refused the request before its first token; ``status`` is set."""


class GenerationError(ClientError):
    """The server reported within the stream that the generation failed."""


class StreamBroken(ClientError):
    """The stream ended, or fell silent, before its final event, or it cannot be read."""


# What the reader of an answer raises if the answer does not follow the protocol.
UNREADABLE = (ValueError, KeyError, TypeError, IndexError, AttributeError)


def unreadable(error: Exception) -> StreamBroken:
    return StreamBroken(f"the server's answer cannot be read: {type(error).__name__}: {error}")
