"""Opens the replies to the gRPC messages for a token model.

Knows what several messages on one stream mean: the first message names the mode. Knows nothing of how messages arrive
or of how replies are merged.
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
from mlserver_torch_stream.protocol.v2_spelling import V2
from mlserver_torch_stream.server.options import read_options
from mlserver_torch_stream.server.streams.token_reply import TokenReply
from mlserver_torch_stream.types import GenerationRequest, StreamMode, TextPrompt

_NOT_FIRST = "only the first message of a stream in MLServer's own framing may say prompt"


class TokenOpener:
    """At most as many requests are open at once as a batch has rows."""

    def __init__(self, generator: Generator, name: str, version: str | None) -> None:
        self.most_open = generator.info.max_num_seqs
        self._generator = generator
        self._name = name
        self._version = version

    def open(
        self,
        payload: InferenceRequest,
        request_id: str,
        index: int | None = None,
        following: AsyncIterator[InferenceRequest] | None = None,
    ) -> tuple[TokenReply, bool]:
        info = self._generator.info
        with self._generator.decoding(request_id):
            spelling = spelling_of(tensor.name for tensor in payload.inputs)
            request = spelling.decode_message(payload, info, streaming=index is not None, request_id=request_id)
            if index is not None and following is None and request.stream_mode is not StreamMode.EACH:
                raise InvalidInput("stream_mode", _NOT_FIRST)
        context = self._context(index)
        if following is None or request.stream_mode is not StreamMode.PROMPT:
            return TokenReply(request, spelling, context, partial(self._generator.start, request)), False
        return TokenReply(request, spelling, context, partial(self._assemble, request, following)), True

    def refused(self, request_id: str, index: int) -> Callable[[Exception], Sequence[JsonObject]]:
        placeholder = GenerationRequest(request_id, (TextPrompt(""),))
        return V2.stream(placeholder, self._context(index)).fail

    def _context(self, index: int | None) -> ReplyContext:
        return ReplyContext(self._name, self._version, int(time.time()), index)

    async def _assemble(
        self, request: GenerationRequest, following: AsyncIterator[InferenceRequest], opened: Opened
    ) -> None:
        pieces = (decode_piece(payload, request, self._generator.info) async for payload in following)
        await self._generator.assemble(request, pieces, opened, timeout=read_options().piece_timeout)
