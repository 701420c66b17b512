"""Opens the replies to the messages of one gRPC stream of a token model.

Knows what several messages mean, which the first one says; nothing of how they arrive or of how replies are merged.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from mlserver.types import InferenceRequest

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.generation import Generator, Opened
from mlserver_torch_stream.protocol.seldon_spelling import spelling_of
from mlserver_torch_stream.protocol.spelling import JsonObject, ReplyContext
from mlserver_torch_stream.protocol.v2_pieces import decode_piece
from mlserver_torch_stream.protocol.v2_spelling import V2, V2Tensors
from mlserver_torch_stream.server.streams.token_reply import TokenReply
from mlserver_torch_stream.types import GenerationRequest, Prompt, StreamMode, TextPrompt


class TokenOpener:
    """At most as many requests are open at once as a batch has rows. ``piece_timeout``: seconds between the pieces of a
    prompt (0: no bound)."""

    def __init__(self, generator: Generator, name: str, version: str | None, piece_timeout: float = 0.0) -> None:
        self.most_open = generator.info.max_rows
        self._generator = generator
        self._name = name
        self._version = version
        self._piece_timeout = piece_timeout

    def unary(self, payload: InferenceRequest, request_id: str) -> TokenReply:
        request, spelling = self._decode(payload, request_id, streaming=False)
        return TokenReply(request, spelling, self._context(None), partial(self._generator.start, request))

    def first(
        self, payload: InferenceRequest, request_id: str, following: AsyncIterator[InferenceRequest]
    ) -> tuple[TokenReply, bool]:
        request, spelling = self._decode(payload, request_id)
        if request.stream_mode is not StreamMode.PROMPT:
            return self._reply(request, spelling, 0), False
        start = partial(self._assemble, request, following)
        return TokenReply(request, spelling, self._context(0), start), True

    def further(self, payload: InferenceRequest, request_id: str, index: int) -> TokenReply:
        with self._generator.decoding(request_id):
            request, spelling = self._read(payload, request_id, streaming=True)
            if request.stream_mode is not StreamMode.EACH:
                raise InvalidInput("stream_mode", "differs from that of the stream's first message")
        return self._reply(request, spelling, index)

    def refused(self, request_id: str, index: int) -> Callable[[Exception], Sequence[JsonObject]]:
        placeholder = GenerationRequest(request_id, (TextPrompt(""),))
        return V2.stream(placeholder, self._context(index)).fail

    def _reply(self, request: GenerationRequest, spelling: V2Tensors, index: int) -> TokenReply:
        return TokenReply(request, spelling, self._context(index), partial(self._generator.start, request))

    def _context(self, index: int | None) -> ReplyContext:
        return ReplyContext(self._name, self._version, int(time.time()), index)

    def _decode(
        self, payload: InferenceRequest, request_id: str, *, streaming: bool = True
    ) -> tuple[GenerationRequest, V2Tensors]:
        with self._generator.decoding(request_id):
            return self._read(payload, request_id, streaming=streaming)

    def _read(
        self, payload: InferenceRequest, request_id: str, *, streaming: bool
    ) -> tuple[GenerationRequest, V2Tensors]:
        spelling = spelling_of(tensor.name for tensor in payload.inputs)
        info = self._generator.info
        return spelling.decode_message(payload, info, streaming=streaming, request_id=request_id), spelling

    async def _assemble(
        self, request: GenerationRequest, following: AsyncIterator[InferenceRequest], opened: Opened
    ) -> None:
        pieces = self._pieces(request, following)
        await self._generator.assemble(request, pieces, opened, timeout=self._piece_timeout)

    async def _pieces(
        self, request: GenerationRequest, following: AsyncIterator[InferenceRequest]
    ) -> AsyncIterator[Prompt]:
        async for payload in following:
            yield decode_piece(payload, request, self._generator.info)
