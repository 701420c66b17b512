"""Declares the interface of spellings: how a request is read, and how its replies, its errors and its end are written.

A new spelling is one file that derives from ``Spelling`` and one row of the table in ``spellings``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.types import GenerationRequest, ModelInfo, Prompt, TokenEvent

JsonObject = dict[str, Any]
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PostedBody:
    """The body of one request: its JSON object, the raw bytes that follow the object, and the HTTP headers."""

    json: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes = b""


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """What a reply shows besides the request and its tokens.

    ``created`` is in seconds since the epoch. ``request_index`` numbers the requests of one gRPC stream. ``headers``
    are CloudEvents attributes; a spelling that has a place for them writes them into the first message.
    """

    model_name: str
    model_version: str | None = None
    created: int = 0
    request_index: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class StreamEncoder(Protocol):
    """Writes the messages of one streamed request. An event of ``MAX_PER_EVENT`` is at most 48 KiB in each message."""

    def event(self, event: TokenEvent) -> Sequence[JsonObject]:
        """The messages of one event; the last event's include all that follows it, such as the usage.

        Raises RequestError where a sequence has failed and the spelling ends the whole request with it.
        """

    def fail(self, error: Exception) -> Sequence[JsonObject]:
        """Ends every sequence that has not ended because of ``error``; no message if all have ended."""

    def end(self) -> bytes | None:
        """The data of the event that ends the stream, such as ``[DONE]``; None if the last message is the end."""


class WholeEncoder(Protocol):
    """Writes the one reply of a request that is not streamed: every event is added, then ``body`` is called once."""

    def add(self, event: TokenEvent) -> None: ...

    def body(self) -> JsonObject: ...


class Spelling(ABC):
    """One way to write a request and its replies. A spelling has no state; its encoders have.

    ``keep_alive``: the block of SSE that is sent while a stream has no events; empty: none. ``event_name_field``: the
    field of a message that names its SSE event; None: the events have no names.
    """

    keep_alive = b": ping\n\n"
    event_name_field: str | None = None

    def accepts(self, body: Mapping[str, Any]) -> bool:
        """True if a body is in this spelling; the spellings of a path are asked in the order of the table."""
        return True

    def model(self, path: Mapping[str, str], body: Mapping[str, Any]) -> tuple[str, str | None]:
        """Name and version of the model: from the path, unless the spelling has them in the body."""
        return path["model_name"], path.get("model_version")

    def streams(self, body: Mapping[str, Any]) -> bool:
        """True if the body asks for a stream. Asked only where the path leaves that to the body."""
        return body.get("stream") is True

    def request_id(self, body: Mapping[str, Any], headers: Mapping[str, str] = NO_HEADERS) -> str:
        """The client's own id of the request; empty if there is none. ``headers`` are those of HTTP, in lower case."""
        return str(body.get("id") or "")

    def headers(self, request_id: str) -> Mapping[str, str]:
        """The HTTP headers of every reply in this spelling, also of an error."""
        return {}

    @abstractmethod
    def decode(self, posted: PostedBody, info: ModelInfo, *, streaming: bool, request_id: str) -> GenerationRequest:
        """Raises InvalidInput."""

    @abstractmethod
    def stream(self, request: GenerationRequest, context: ReplyContext) -> StreamEncoder: ...

    @abstractmethod
    def whole(self, request: GenerationRequest, context: ReplyContext) -> WholeEncoder: ...

    def attach(self, posted: PostedBody, body: JsonObject) -> tuple[JsonObject, bytes | None]:
        """The whole reply as it is sent, and the raw bytes that follow its JSON; None: the reply is JSON alone."""
        return body, None

    def refusal(self, error: RequestError) -> tuple[int, JsonObject]:
        """Status and body of an error before the first token."""
        return error.status, {"error": error.message}


class PromptCodec(Protocol):
    """A model's tokenizer and its chat template. Every method may take long, and may raise InvalidInput."""

    def encode(self, prompt: Prompt) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def token_strings(self, ids: Sequence[int]) -> Sequence[str]:
        """The tokens as the tokenizer's vocabulary has them."""


class PromptSpelling(ABC):
    """What a spelling has besides if its requests ask about a prompt alone, so that nothing is generated."""

    @abstractmethod
    def answer(self, request: GenerationRequest, codec: PromptCodec, info: ModelInfo) -> JsonObject:
        """The whole reply. Called in a thread; raises RequestError."""
