"""Defines a call of the client: its arguments, the deltas that it yields, how it ends, and its errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlserver_torch_stream.tool_calls import ToolCallDelta

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """Either one or several raw ``prompts``, or the ``messages`` of a chat."""

    model: str
    prompts: tuple[str, ...]
    messages: Messages | None
    parameters: Mapping[str, Any]


def generation_call(
    model: str, prompt: str | Sequence[str] | None, messages: Messages | None, parameters: Mapping[str, Any]
) -> GenerationCall:
    """Returns the call, without the parameters that are None. Raises ValueError unless exactly one of ``prompt`` and
    ``messages`` is given.
    """
    if (prompt is None) == (messages is None):
        raise ValueError("give exactly one of prompt and messages")
    prompts = (prompt,) if isinstance(prompt, str) else tuple(prompt or ())
    given = {name: value for name, value in parameters.items() if value is not None}
    return GenerationCall(model, prompts, messages, given)


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token. ``top`` has the most likely tokens at its position, as many as were asked
    for.
    """

    logprob: float
    token_id: int | None = None
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """The tokens of all prompts and of all answers of one request."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event adds to the sequence with this ``index``. Sequences are numbered prompt by prompt.

    A sequence's last delta has the finish reason and the token counts. The last delta of the request is ``final``, and
    has the usage if the server sends it.
    """

    text: str = ""
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    usage: RequestUsage | None = None
    final: bool = False
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __str__(self) -> str:
        return self.text


class ClientError(Exception):
    """The generation failed. The message has the reason that the server or the network gave.

    ``status`` is the server's HTTP status, or over gRPC the HTTP status for its code; None if the server sent no
    status. ``retry_after`` is in seconds; None if the server did not send it.
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
    """The stream cannot be read, or it ended or timed out before its final event."""


# What the reader of an answer raises if the answer does not follow the protocol.
UNREADABLE = (ValueError, KeyError, TypeError, IndexError, AttributeError)


def unreadable(error: Exception) -> StreamBroken:
    """Returns the error for an answer that breaks the protocol."""
    return StreamBroken(f"the server's answer cannot be read: {type(error).__name__}: {error}")


class StreamEnding:
    """Remembers whether a stream has started and whether it has ended. ``started`` means that its first event has
    arrived.
    """

    def __init__(self) -> None:
        self.started = False
        self._final = False

    def note(self, deltas: Sequence[Delta]) -> Iterator[Delta]:
        """Yields the deltas of one event, and remembers whether one of them is the final one."""
        self.started = True
        for delta in deltas:
            self._final = self._final or delta.final
            yield delta

    def check(self) -> None:
        """Raises StreamBroken if the final event has not arrived."""
        if not self._final:
            raise self.broken("the stream ended before its final event")

    def broken(self, message: str) -> StreamBroken:
        return StreamBroken(
            message if self.started else f"{message} (before its first event: the server's log says why)"
        )
