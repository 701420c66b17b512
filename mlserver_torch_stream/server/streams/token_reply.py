"""One request being answered: its token stream, and the V2 responses made of it.

``bodies`` and ``whole_body`` are responses as REST spells them, ``replies`` and ``whole`` are MLServer's model of them,
for gRPC. Knows nothing of other requests on the same stream, nor of how a token stream comes about: it is given what
starts one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mlserver.types import InferenceResponse

from mlserver_torch_stream.engine.api import TokenStream
from mlserver_torch_stream.errors import GenerationFailed, RequestError
from mlserver_torch_stream.generation import Opened
from mlserver_torch_stream.protocol.v2_outputs import Body, as_response
from mlserver_torch_stream.protocol.v2_reply import StreamReply, UnaryReply
from mlserver_torch_stream.types import GenerationRequest, TokenEvent

Spelled = TypeVar("Spelled")
Start = Callable[[Opened], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ModelName:
    """How replies name the model."""

    name: str
    version: str | None


class V2Answer:
    """Reads the token stream that ``start`` opens, once: as a stream of responses or as a whole."""

    def __init__(
        self, request: GenerationRequest, model: ModelName, start: Start, request_index: int | None = 0
    ) -> None:
        created = int(time.time())
        self._request = request
        self._request_index = request_index
        self._start = start
        self._stream: TokenStream | None = None
        self._closed = False
        self._begun = False
        self.error: Exception | None = None  # of the first sequence that failed after the answer had begun
        self._reply = StreamReply(request, model.name, model.version, created=created, request_index=request_index)
        self._unary = UnaryReply(request, model.name, model.version, created=created)

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def chat_tensors(self) -> bool:
        """True for a request in Seldon's spelling."""
        return self._request.reply.chat_tensors

    def close(self) -> None:
        self._closed = True
        if self._stream is not None:
            self._stream.close()

    def replies(self) -> AsyncIterator[InferenceResponse]:
        return self._spelled(as_response)

    def bodies(self) -> AsyncIterator[Body]:
        return self._spelled(_as_it_is)

    async def whole(self) -> InferenceResponse:
        return as_response(await self.whole_body())

    async def whole_body(self, binary: Callable[[str], bool] | None = None) -> Body:
        """All that was generated, as one response. Its BYTES are text, which JSON and raw bytes carry alike."""
        async for event in self._events():
            if event.error is not None:
                raise _as_request_error(event.error)
            self._unary.add(event)
        return self._unary.body()

    def failure(self, error: Exception) -> Sequence[InferenceResponse]:
        return [as_response(body) for body in self.failure_bodies(error)]

    def failure_bodies(self, error: Exception) -> Sequence[Body]:
        """Final responses for the sequences that have none, with the reason in the parameter ``error``."""
        return self._reply.fail(error)

    async def _spelled(self, spell: Callable[[Body], Spelled]) -> AsyncIterator[Spelled]:
        """The responses; one only, if the request said ``stream: false``."""
        if self._request.stream is False:
            whole = await self.whole_body()
            if self._request_index is not None:
                whole["parameters"]["request_index"] = self._request_index
            yield spell(whole)
            return
        async for event in self._events():
            self.error = self.error or event.error
            body = self._reply.body(event)
            self._begun = True
            yield spell(body)

    async def _events(self) -> AsyncIterator[TokenEvent]:
        await self._start(self._opened)
        assert self._stream is not None
        unfinished = len(self._request.prompts) * self._request.sampling.n
        async for event in self._stream:
            if event.error is not None and not self._begun:
                raise _as_request_error(event.error)
            unfinished -= event.finish_reason is not None
            yield event
        if unfinished and self._closed:
            raise asyncio.CancelledError("the answer was closed before its end")
        if unfinished:
            raise GenerationFailed("the token stream ended early")

    def _opened(self, stream: TokenStream) -> None:
        self._stream = stream
        if self._closed:
            stream.close()


def _as_request_error(error: Exception) -> RequestError:
    return error if isinstance(error, RequestError) else GenerationFailed(str(error) or type(error).__name__)


def _as_it_is(body: Body) -> Body:
    return body
