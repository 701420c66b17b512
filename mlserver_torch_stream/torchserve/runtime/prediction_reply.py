"""Replies to one request on TorchServe's own paths: the handler's pieces, also where it has set a status of an error.

Knows nothing of HTTP and gRPC.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.torchserve.handler_request import HandlerFailed, ResponsePiece
from mlserver_torch_stream.torchserve.runtime.handler_reply import HandlerReply


class PredictionFailed(RequestError):
    """The handler's failure, with the status that TorchServe gives it."""

    def __init__(self, failed: HandlerFailed) -> None:
        super().__init__(failed.message)
        self.status = failed.handlers_status


class PredictionReply:
    def __init__(self, reply: HandlerReply) -> None:
        self._reply = reply

    async def whole(self) -> bytes:
        """All pieces joined. Raises RequestError."""
        return b"".join([piece.value async for piece in self.pieces(whole=True)])

    async def pieces(self, *, whole: bool = False) -> AsyncGenerator[ResponsePiece, None]:
        """``whole``: they are bounded. Raises RequestError."""
        try:
            async with aclosing(self._reply.pieces(whole=whole)) as pieces:
                async for piece in pieces:
                    yield piece
        except HandlerFailed as failed:
            if failed.piece is None or failed.piece.status != failed.handlers_status:
                raise PredictionFailed(failed) from None
            yield failed.piece

    def close(self) -> None:
        self._reply.close()
