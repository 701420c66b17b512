"""One V2 request being answered: its token stream, and the V2 responses made of it.

Knows nothing of other requests on the same stream, nor of how a token stream comes about: it is given what starts one.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from mlserver.types import InferenceResponse, Parameters

from mlserver_torch_stream.engine.api import TokenStream
from mlserver_torch_stream.errors import GenerationFailed, RequestError
from mlserver_torch_stream.generation import Opened
from mlserver_torch_stream.protocol.v2_reply import StreamReply, UnaryReply
from mlserver_torch_stream.types import FinishReason, GenerationRequest, TokenEvent

Start = Callable[[Opened], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ModelName:
    """How replies name the model."""

    name: str
    version: str | None


class V2Answer:
    """Reads the token stream that ``start`` opens, once: as a stream of responses or as a whole."""

    def __init__(self, request: GenerationRequest, model: ModelName, start: Start, request_index: int = 0) -> None:
        created = int(time.time())
        self._request = request
        self._request_index = request_index
        self._start = start
        self._stream: TokenStream | None = None
        self._closed = False
        self._begun = False
        self._reply = StreamReply(request, model.name, model.version, created=created, request_index=request_index)
        self._unary = UnaryReply(request, model.name, model.version, created=created)

    def close(self) -> None:
        self._closed = True
        if self._stream is not None:
            self._stream.close()

    async def replies(self) -> AsyncIterator[InferenceResponse]:
        """The responses; one only, if the request said ``stream: false``."""
        if self._request.stream is False:
            whole = await self.whole()
            _set(whole, "request_index", self._request_index)
            yield whole
            return
        async for event in self._events():
            response = self._reply.encode(event)
            if event.error is not None:
                _set(response, "error", str(event.error))
            self._begun = True
            yield response

    async def whole(self) -> InferenceResponse:
        """All that was generated, as one response."""
        async for event in self._events():
            if event.error is not None:
                raise _as_request_error(event.error)
            self._unary.add(event)
        return self._unary.response()

    def failure(self, error: Exception) -> Sequence[InferenceResponse]:
        """Final responses for the sequences that have none, with the reason in the parameter ``error``."""
        responses = self._reply.abandon(FinishReason.ERROR)
        for response in responses:
            _set(response, "error", str(error) or type(error).__name__)
        return responses

    async def _events(self) -> AsyncIterator[TokenEvent]:
        await self._start(self._opened)
        assert self._stream is not None
        unfinished = len(self._request.prompts) * self._request.sampling.n
        async for event in self._stream:
            if event.error is not None and not self._begun:
                raise _as_request_error(event.error)
            unfinished -= event.finish_reason is not None
            yield event
        if unfinished:
            raise GenerationFailed("the token stream ended early")

    def _opened(self, stream: TokenStream) -> None:
        self._stream = stream
        if self._closed:
            stream.close()


def _as_request_error(error: Exception) -> RequestError:
    return error if isinstance(error, RequestError) else GenerationFailed(str(error) or type(error).__name__)


def _set(response: InferenceResponse, key: str, value: str | int) -> None:
    parameters = response.parameters or Parameters()
    setattr(parameters, key, value)
    response.parameters = parameters
