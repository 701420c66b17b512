"""Lets a server of this project infer whole batches over one long HTTP exchange, and the chunks of sequences."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import count
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from mlserver_torch_stream.client.http_transport import error_message
from mlserver_torch_stream.cloud.answers import OpenAIAnswer, answer_too_large, parse, predicted
from mlserver_torch_stream.cloud.endpoint import (
    FRAMES,
    UNSENDABLE,
    Backend,
    RowFailed,
    RowRejected,
    ServerEndpoint,
    ServerUnready,
    unsent,
)
from mlserver_torch_stream.cloud.rows import (
    CloudError,
    Failure,
    Outcome,
    Row,
    RunRefused,
    SequenceLost,
    StoreUnavailable,
)
from mlserver_torch_stream.handlers.frames import FrameBuffer, encode_frame, split

_FULL = 429
_Frame = tuple[dict[str, Any], bytes]


class BatchBackend(Backend):
    """Sends batches to a server of this project over one long HTTP exchange. The server answers every row of
    a batch.
    """

    def __init__(self, endpoint: ServerEndpoint, model: str) -> None:
        super().__init__(endpoint, model)
        self._exchange: asyncio.Task[None] | None = None
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._waiting: dict[int, asyncio.Future[list[_Frame]]] = {}
        self._numbers = count()

    async def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        if any(row.sequence is not None for row in rows):
            return [await self._in_sequence(row) for row in rows]
        outcomes: dict[int, Outcome] = {}
        frames: dict[int, bytes] = {}  # the frames of the rows that have no outcome yet
        for index, row in enumerate(rows):
            try:
                frames[index] = self._frame(row)
            except UNSENDABLE as error:
                outcomes[index] = unsent(error)
        try:
            await self.retry_busy(frames, outcomes)
        except (RowFailed, RowRejected) as error:  # the server has refused the whole request
            failure = error.failure
            if len(frames) > 1:
                failure = Failure(failure.code, failure.message, failure.status, failure.error, shared=True)
            outcomes |= dict.fromkeys(frames, Outcome(failure=failure))
        return [outcomes[index] for index in range(len(rows))]

    async def retry_busy(self, frames: dict[int, bytes], outcomes: dict[int, Outcome]) -> None:
        """Moves each row from ``frames`` to ``outcomes``. Rows that the model cannot accept yet are sent again."""

        async def attempt() -> None:
            began = time.monotonic()
            answers = await self._post(list(frames.values()))
            span = began, time.monotonic()
            busy = ""
            for index, (head, body) in zip(list(frames), answers, strict=True):
                if head.get("busy"):
                    busy = error_message(parse(body)["error"])
                else:
                    outcomes[index] = self._outcome(head, body, span)
                    del frames[index]
            if busy:
                raise ServerUnready(f"the model takes no more rows now: {busy}")

        if frames:
            await self.endpoint.retry.run(attempt, on_retry=self._count_retry)

    async def _in_sequence(self, row: Row) -> Outcome:
        """Returns the outcome of a chunk. The chunk is sent again only if no worker has received it. Raises
        SequenceLost if the connection breaks or the worker fails.
        """
        frame = self._frame(row)
        starts = row.chunk is not None and row.chunk.index == 0

        async def attempt() -> Outcome:
            began = time.monotonic()
            try:
                ((head, body),) = await self._post([frame])
            except ServerUnready:
                raise
            except StoreUnavailable as error:
                raise SequenceLost(error.message) from error
            if head.get("busy") or head.get("shared"):
                message = error_message(parse(body)["error"])
                if head["busy"] and (head["status"] == _FULL or starts):
                    raise ServerUnready(f"the model takes no more rows now: {message}")
                raise SequenceLost(message)
            return self._outcome(head, body, (began, time.monotonic()))

        return await self.endpoint.retry.run(attempt, on_retry=self._count_retry)

    def end_sequence(self, name: str) -> None:
        """Tells the server that no further chunk of this sequence comes."""
        self._begin_exchange()
        self._outgoing.put_nowait(encode_frame({"end_sequence": name}))

    async def tokens(self, row: Row) -> int:
        """Returns the number of tokens of the row's prompt; if the row has no valid request, its number of bytes."""
        try:
            frame = self._frame(row, counted=True)
        except UNSENDABLE:
            return row.size
        ((head, _),) = await self._post([frame])
        return int(head.get("tokens", row.size))

    async def workers(self) -> tuple[int, int]:
        """Returns the batch size and the number of workers of a handler."""
        described = await self.describe()
        return described["batchSize"], max(1, described["minWorkers"], described["maxWorkers"])

    async def most_sequences(self) -> int:
        """Returns how many sequences a handler can have open at a time. Raises RunRefused if the handler keeps no
        state, or keeps it without a time limit.
        """
        described = await self.describe()
        if not described["stateful"]:
            raise RunRefused("--sequences: the handler keeps no state; set sequenceBatching in its model-config.yaml")
        if not described["sequenceMaxIdleMSec"]:
            raise RunRefused("--sequences: set sequenceMaxIdleMSec in the handler's model-config.yaml, above 0")
        return int(described["maxNumSequence"])

    async def describe(self) -> Any:
        """Returns the description of a model's workers. Raises an error of aiohttp, or ValueError."""
        async with self._session.get(URL(self._url + self._path, encoded=True), allow_redirects=False) as response:
            return await response.json()

    @property
    def _path(self) -> str:
        return f"/v2/models/{quote(self.model, safe='')}/batch"

    def _frame(self, row: Row, counted: bool = False) -> bytes:
        if (objects := self.endpoint.objects) is not None:
            head: dict[str, Any] = {"id": objects.request_id(row), "content_type": objects.content_type(row)}
            if row.sequence is not None and row.chunk is not None:
                ends = {"sequence_start": row.chunk.index == 0, "sequence_end": row.chunk.last}
                head["sequence"] = {"sequence_id": row.sequence, **ends}
            return encode_frame({**head, "headers": objects.all_headers(row)}, row.data)
        ask = self.endpoint.rows.ask(row)
        body = {**ask.body, "model": self.model}
        content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        return encode_frame({"path": ask.path, **({"count": True} if counted else {})}, content)

    async def _post(self, frames: Sequence[bytes]) -> list[_Frame]:
        """Returns the answers to one batch. Raises CloudError if the connection breaks before they arrive."""
        self._begin_exchange()
        number = next(self._numbers)
        answers: asyncio.Future[list[_Frame]] = asyncio.get_running_loop().create_future()
        outgoing, waiting = self._outgoing, self._waiting
        waiting[number] = answers
        outgoing.put_nowait(b"".join((encode_frame({"batch": number, "items": len(frames)}), *frames)))
        try:
            return await answers
        except asyncio.CancelledError:
            outgoing.put_nowait(encode_frame({"cancel": number}))
            raise
        finally:
            waiting.pop(number, None)

    def _begin_exchange(self) -> None:
        if self._exchange is None or self._exchange.done():
            self._outgoing, self._waiting = asyncio.Queue(), {}
            self._exchange = asyncio.create_task(self._run_exchange(self._outgoing, self._waiting))

    async def _run_exchange(
        self, outgoing: asyncio.Queue[bytes], waiting: dict[int, asyncio.Future[list[_Frame]]]
    ) -> None:
        """Sends batches and receives their answers until the connection breaks; then all batches without an answer
        fail.
        """
        try:
            async with self._posted(self._path, _all_of(outgoing), FRAMES) as response:
                if response.status != 200:
                    raise self._refusal(response, await response.read())
                async for number, answers in _answered_batches(response.content):
                    if number in waiting and not waiting[number].done():
                        waiting[number].set_result(answers)
            raise StoreUnavailable(f"{self._url}: the server ended the exchange of batches")
        except Exception as error:  # also of an answer that is not valid
            why = f"the answer to a batch cannot be read: {type(error).__name__}: {error}"
            broken = StoreUnavailable(f"{self._url}: {why}")
            for answer in list(waiting.values()):
                if not answer.done():
                    answer.set_exception(error if isinstance(error, CloudError) else broken)

    async def aclose(self) -> None:
        if self._exchange is not None:
            self._exchange.cancel()
            await asyncio.wait({self._exchange})
        await super().aclose()

    def _outcome(self, head: Mapping[str, Any], body: bytes, span: tuple[float, float]) -> Outcome:
        if "too_large" in head:
            return answer_too_large(head["too_large"])
        if head["status"] != 200:
            error = parse(body)["error"]
            code = error["code"] or ("invalid_request" if head["status"] < 500 else "generation_failed")
            return Outcome(failure=Failure(code, error["message"], head["status"], error, head["shared"]))
        if self.endpoint.objects is not None:
            kinds = [head["content_type"]] * len(head["lengths"])
            pieces = list(zip(split(body, head["lengths"]), kinds, strict=True))
            return predicted(pieces, self.endpoint.objects.pieces, span)
        answer = OpenAIAnswer()
        answer.whole(parse(body))
        whole = {**answer.body(), "model": self.endpoint.name or self.model}
        whole["usage"].pop("prompt_tokens_details", None)  # how much was cached differs from run to run
        return Outcome(whole, None, answer.prompt_tokens, answer.completion_tokens, span)


async def _all_of(queue: asyncio.Queue[bytes]) -> AsyncIterator[bytes]:
    """Yields the contents of the queue forever. Entries that are in the queue at the same time are yielded as one."""
    while True:
        parts = [await queue.get()]
        while not queue.empty():
            parts.append(queue.get_nowait())
        yield b"".join(parts)


async def _answered_batches(content: aiohttp.StreamReader) -> AsyncIterator[tuple[int, list[_Frame]]]:
    buffer, number, missing = FrameBuffer(), 0, 0
    answers: list[_Frame] = []
    async for data in content.iter_any():
        buffer.feed(data)
        while (frame := buffer.take()) is not None:
            if not missing:
                number, missing, answers = frame[0]["batch"], frame[0]["items"], []
                continue
            answers.append(frame)
            missing -= 1
            if not missing:
                yield number, answers
