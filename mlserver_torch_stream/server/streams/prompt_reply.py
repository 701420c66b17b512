"""The reply to a request that asks about a prompt alone, such as its number of tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from mlserver_torch_stream.protocol.spelling import JsonObject


class PromptReply:
    """Calls ``answer``, once. It is always whole."""

    keep_alive = b""
    error: Exception | None = None

    def __init__(self, request_id: str, answer: Callable[[], Awaitable[JsonObject]]) -> None:
        self.request_id = request_id
        self._answer = answer

    async def bodies(self) -> AsyncIterator[JsonObject]:
        yield await self._answer()

    async def attached(self) -> tuple[JsonObject, bytes | None]:
        return await self._answer(), None

    def failure(self, error: Exception) -> Sequence[JsonObject]:
        return ()

    def end(self) -> bytes | None:
        return None

    def close(self) -> None:
        """Does nothing: what a thread has begun goes on."""
