"""Lets a server infer rows over HTTP: prompts by the V2 protocol or OpenAI's API, objects as predictions or tensors.

A server of this project also accepts whole batches. A row that the server refuses fails with the server's reason.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from mlserver_torch_stream.client import EventParser
from mlserver_torch_stream.client.call import GenerationCall
from mlserver_torch_stream.client.http_transport import error_message, retry_after_s
from mlserver_torch_stream.client.v2_json import http_request
from mlserver_torch_stream.cloud.answers import (
    AnswerTooLarge,
    GenerationBroke,
    HttpAnswer,
    OpenAIAnswer,
    PieceCollector,
    V2ServerAnswer,
    answer_too_large,
    parse,
    predicted,
)
from mlserver_torch_stream.cloud.endpoint import (
    BROKEN,
    FRAMES,
    JSON,
    MAX_ERROR_CHARACTERS,
    OK,
    UNREADABLE,
    Backend,
    RowBackend,
    RowFailed,
    RowRejected,
    ServerEndpoint,
    ServerUnready,
    lasting_refusal,
    only_model,
    row_failure,
)
from mlserver_torch_stream.cloud.parse import MAX_ANSWER_BYTES, PREDICTIONS
from mlserver_torch_stream.cloud.requests import ObjectRequest, RowQuestion, RowUnsuitable
from mlserver_torch_stream.cloud.rows import (
    CloudError,
    Failure,
    Infer,
    Kind,
    Outcome,
    Row,
    RunRefused,
    SequenceLost,
    StoreUnavailable,
    refusal,
)
from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.handlers.frames import FrameBuffer, encode_frame, split
from mlserver_torch_stream.protocol.openai_stream import BAD_REQUEST
from mlserver_torch_stream.protocol.parameters import SILENT_IN_BODY


async def open_backend(endpoint: ServerEndpoint) -> Backend:
    """Returns the backend of an endpoint.

    Raises RunRefused if the endpoint names no model, and the server has none or several.
    """
    model = endpoint.model or await only_model(endpoint.url, endpoint.api, endpoint.key)
    if endpoint.batches is None and endpoint.tensor is None:
        endpoint = await _recognised(endpoint, model)
    if endpoint.batches:
        return BatchBackend(endpoint, model)
    if endpoint.tensor is not None:
        return TensorBackend(endpoint, model)
    return PredictionBackend(endpoint, model) if endpoint.api == "torchserve" else GenerationBackend(endpoint, model)


async def _recognised(endpoint: ServerEndpoint, model: str) -> ServerEndpoint:
    """Returns the endpoint with ``batches`` if this project's server has the model."""
    backend = BatchBackend(endpoint, model)
    try:
        described = await backend.describe()
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError):
        described = None  # the first request says what is wrong
    finally:
        await backend.aclose()
    if not isinstance(described, dict) or not isinstance(described.get("workers"), list):
        return endpoint
    objects = endpoint.objects
    if "batchSize" in described:  # a handler, which gets the bytes of objects
        objects = _objects(endpoint)
    return replace(endpoint, batches=True, objects=objects)


@asynccontextmanager
async def opened(model: Infer | ServerEndpoint | str) -> AsyncIterator[Infer]:
    """Yields ``model`` itself if it is a callable, otherwise a backend for the server at this endpoint or URL."""
    if not isinstance(model, ServerEndpoint | str):
        yield model
        return
    backend = await open_backend(ServerEndpoint(model) if isinstance(model, str) else model)
    try:
        yield backend
    finally:
        await backend.aclose()


class GenerationBackend(RowBackend):
    """Sends a generation request for each row, and reads a streamed or a whole answer."""

    async def _one(self, row: Row) -> Outcome:
        try:
            ask = self.endpoint.rows.ask(row)
            path, body = self._request(ask)
            content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except _UNSENDABLE as error:
            return _unsent(error)
        return await self._tried(lambda alone: self._attempt(path, content, ask))

    def _request(self, ask: RowQuestion) -> tuple[str, dict[str, Any]]:
        if self.endpoint.api == "openai":
            body: dict[str, Any] = {**ask.body, "model": self.model, "stream": self.endpoint.stream}
            if self.endpoint.stream:
                body["stream_options"] = {"include_usage": True}
            return ask.path, body
        # The prompt is None in a chat, which has messages, and in a row without a prompt, which the server refuses.
        prompts: Any = (ask.prompt,)
        call = GenerationCall(self.model, prompts, ask.messages, _v2_parameters(ask))
        return http_request(call, self.endpoint.stream)

    async def _attempt(self, path: str, content: bytes, ask: RowQuestion) -> Outcome:
        name = self.endpoint.name or self.model
        answer = OpenAIAnswer() if self.endpoint.api == "openai" else V2ServerAnswer(name, ask.chat)
        async with self.gate.through() as started:
            began = time.monotonic()
            async with self._answered(started, path, content, JSON) as response:
                body = await self._read(response, answer)
        span = began, time.monotonic()
        return Outcome(body, None, answer.prompt_tokens, answer.completion_tokens, span)

    async def _read(self, response: aiohttp.ClientResponse, answer: HttpAnswer) -> dict[str, Any]:
        """Returns the answer as OpenAI's object. Raises CloudError if the generation fails or the answer cannot be
        read.
        """
        try:
            if not self.endpoint.stream:
                answer.whole(parse(await response.read()))
                return answer.body()
            parser, ended = EventParser(), False
            async for chunk in response.content.iter_any():
                for event in parser.feed(chunk):
                    ended = answer.event(event) or ended
            if ended:
                return answer.body()
        except GenerationBroke as error:
            raise RowFailed(f"the generation failed: {error}", BROKEN, error.error) from None
        except aiohttp.ClientError:
            raise
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise _unreadable(error) from None
        raise StoreUnavailable(f"{self._url}: the stream ended before its last event")


_FULL = 429
_PROMPT = "str"  # MLServer's content type of a text
_TEXT_TYPES = ("text/", "application/json")  # the beginnings of content types whose elements JSON can hold
_UNSENDABLE = (RowUnsuitable, RequestError, ValueError, RecursionError)  # a row with one of these errors is not sent
_BUSY = ("ServiceUnavailableException",)  # a full queue or no worker; a failing handler has another type
_UNKNOWN = ("ModelNotFoundException", "ModelVersionNotFoundException")


class PredictionBackend(RowBackend):
    """Posts each object or chunk to ``/predictions/{model}``, where the model is a handler's name or
    ``name/version``.
    """

    async def _one(self, row: Row) -> Outcome:
        request = _objects(self.endpoint)
        headers = {
            **request.all_headers(row),
            "content-type": request.content_type(row),
            "x-request-id": request.request_id(row),
        }
        return await self._tried(lambda alone: self._attempt(row.data, headers, alone))

    async def _attempt(self, content: bytes, headers: Mapping[str, str], alone: bool) -> Outcome:
        pieces = PieceCollector()
        async with self.gate.through(alone) as started:
            began = time.monotonic()
            try:
                async with self._posted(f"/predictions/{quote(self.model)}", content, headers) as response:
                    await pieces.read(response.content, response.headers.get("content-type", ""))
            except AnswerTooLarge as error:
                return answer_too_large(str(error))
            except StoreUnavailable as error:
                if pieces.found:  # the handler failed after its first piece, for example
                    text = f"{error}, after {len(pieces.found)} piece{'s' * (len(pieces.found) > 1)} of the answer"
                    raise RowFailed(text, UNREADABLE) from error
                raise
            if response.status not in OK:
                raise self._refused(started, response, b"".join(value for value, _ in pieces.found))
            self.gate.concurrency.answered()
        return predicted(pieces.found, _objects(self.endpoint).pieces, (began, time.monotonic()))

    def _refused(self, started: int, answer: aiohttp.ClientResponse, body: bytes) -> CloudError:
        error, status = _torchserve_error(body), answer.status
        kind = str(error.get("type"))
        text = str(error.get("message") or body.decode(errors="replace")[:MAX_ERROR_CHARACTERS].strip())
        text = self._without_key(f"{self._url} answered {status}: {text}")
        if status == 429 or kind in _BUSY:
            self.gate.concurrency.refused(started)
            return ServerUnready(text, retry_after_s(answer.headers))
        return lasting_refusal(text, status, missing=kind in _UNKNOWN)


@dataclass(frozen=True, slots=True)
class _Element:
    """What a row adds to a BYTES tensor. ``own`` are the parameters of a request with this row alone, and ``shared``
    those of a batch.
    """

    value: bytes
    content_type: str
    own: Mapping[str, Any]
    shared: Mapping[str, Any]


class TensorBackend(RowBackend):
    """Sends each object, chunk or prompt as an element of a BYTES tensor. The prediction is the list of the output
    tensors.

    The tensor has as many dimensions as in the model's metadata. If the first of them has any size there, a batch of
    rows with one content type and the same parameters is one request. Text is sent as JSON, other bytes after the JSON.
    """

    def __init__(self, endpoint: ServerEndpoint, model: str) -> None:
        super().__init__(endpoint, model)
        self._asking = asyncio.Lock()
        self._shape: list[int] | None = None  # of one row; a first dimension of -1 has room for a batch

    async def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        batch = self._batch(rows)
        if not batch or (await self._row_shape())[0] != -1:
            return await super().__call__(rows)
        whole = await self._tensor(batch, batch[0].shared)
        if (failure := whole.failure) is None:
            try:
                return _split(whole, len(batch))
            except ValueError as error:
                self._shape = [1, *(await self._row_shape())[1:]]  # from now on rows are sent one by one
                failure = row_failure("server_error", str(error), UNREADABLE, None)
        return [Outcome(failure=replace(failure, shared=True))] * len(batch)

    def _batch(self, rows: Sequence[Row]) -> list[_Element]:
        """Returns the elements of rows that can share a request; none if they cannot, or if there is only one."""
        try:
            batch = [self._element(row) for row in rows]
        except _UNSENDABLE:
            return []
        kinds = [(each.content_type, each.shared) for each in batch]
        return batch if len(batch) > 1 and all(each == kinds[0] for each in kinds) else []

    def _element(self, row: Row) -> _Element:
        """Returns the row's element: a prompt, unless the endpoint has ``objects``. Raises one of ``_UNSENDABLE``."""
        if self.endpoint.objects is None and row.kind in (Kind.JSONL, Kind.TEXT):
            ask = self.endpoint.rows.ask(row)
            if ask.prompt is None:
                raise RowUnsuitable("a tensor holds a prompt, and cannot hold messages")
            return _Element(ask.prompt.encode(), _PROMPT, parameters := _v2_parameters(ask), parameters)
        objects = _objects(self.endpoint)
        return _Element(row.data, objects.content_type(row), objects.all_headers(row), objects.headers)

    async def _one(self, row: Row) -> Outcome:
        try:
            element = self._element(row)
        except _UNSENDABLE as error:
            return _unsent(error)
        await self._row_shape()
        return await self._tensor([element], element.own)

    async def _tensor(self, elements: Sequence[_Element], parameters: Mapping[str, Any]) -> Outcome:
        values, content_type = [each.value for each in elements], elements[0].content_type
        described: dict[str, Any] = {"content_type": content_type}
        shape = [len(values), *[1] * (len(self._shape or [1]) - 1)]
        tensor: dict[str, Any] = {"name": self.endpoint.tensor, "shape": shape, "datatype": "BYTES"}
        tensor["parameters"] = described
        raw = b""
        try:
            tensor["data"] = _texts(values, content_type)
        except ValueError:
            raw = b"".join(part for value in values for part in (len(value).to_bytes(4, "little"), value))
            described["binary_data_size"] = len(raw)
        try:
            body = {"parameters": dict(parameters), "inputs": [tensor]}
            head = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except _UNSENDABLE as error:
            return _unsent(error)
        headers = {**FRAMES, "Inference-Header-Content-Length": str(len(head))} if raw else JSON
        return await self._tried(lambda alone: self._attempt(head + raw, headers, alone))

    async def _row_shape(self) -> list[int]:
        """Returns the tensor's shape in the model's metadata; [1] if they do not tell it, or if one element cannot have
        this shape.
        """
        async with self._asking:
            if self._shape is None:
                url = URL(f"{self._url}/v2/models/{quote(self.model, safe='')}", encoded=True)
                with suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError, KeyError, TypeError):
                    async with self._session.get(url, allow_redirects=False) as response:
                        self._shape = [1]
                        inputs = {each["name"]: each["shape"] for each in (await response.json())["inputs"]}
                    shape = list(inputs[self.endpoint.tensor])
                    self._shape = shape if shape and {-1, 1}.issuperset(shape) else [1]
            return self._shape or [1]

    async def _attempt(self, content: bytes, headers: Mapping[str, str], alone: bool) -> Outcome:
        path = f"/v2/models/{quote(self.model, safe='')}/infer"
        async with self.gate.through(alone) as started:
            began, answer = time.monotonic(), bytearray()
            async with self._answered(started, path, content, headers) as response:
                async for part in response.content.iter_any():
                    answer += part
                    if len(answer) > MAX_ANSWER_BYTES:
                        return answer_too_large(f"the answer is larger than {MAX_ANSWER_BYTES} bytes")
        body = {"object": "prediction", "content_type": "application/json", PREDICTIONS: [_outputs(bytes(answer))]}
        return Outcome(body, span=(began, time.monotonic()))


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
            except _UNSENDABLE as error:
                outcomes[index] = _unsent(error)
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
        except (RowUnsuitable, RequestError, ValueError, RecursionError):
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
            broken = StoreUnavailable(f"{self._url}: the answer to a batch cannot be read: {_named(error)}")
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


def _objects(endpoint: ServerEndpoint) -> ObjectRequest:
    return endpoint.objects or ObjectRequest()


def _v2_parameters(ask: RowQuestion) -> dict[str, Any]:
    """Returns the row's parameters that V2 has: OpenAI's API also has parameters that change nothing."""
    return {key: value for key, value in ask.parameters.items() if key not in SILENT_IN_BODY}


def _texts(values: Sequence[bytes], content_type: str) -> list[str]:
    """Returns the elements of a tensor of text. Raises ValueError if they are anything else."""
    if content_type != _PROMPT and not content_type.startswith(_TEXT_TYPES):
        raise ValueError(f"{content_type} is not text")
    return [value.decode() for value in values]


def _split(whole: Outcome, count: int) -> list[Outcome]:
    """Splits the output tensors of ``count`` rows. Raises ValueError if they do not have one row for each."""
    assert whole.response is not None
    (tensors,) = whole.response[PREDICTIONS]
    parts = []
    for tensor in tensors:
        data, shape = tensor.get("data", ()), list(tensor.get("shape", ()))
        if shape[:1] != [count] or len(data) % count:
            raise ValueError(f"{tensor.get('name')}: has the shape {shape} for a batch of {count} rows")
        size, first = len(data) // count, {**tensor, "shape": [1, *shape[1:]]}
        parts.append([{**first, "data": data[at * size : (at + 1) * size]} for at in range(count)])
    rows = [[part[at] for part in parts] for at in range(count)]
    return [Outcome({**whole.response, PREDICTIONS: [row]}, span=whole.span) for row in rows]


def _unsent(error: Exception) -> Outcome:
    """Returns the outcome of a row that cannot be sent, for example because of a lone surrogate, NaN or nesting that
    is too deep.
    """
    if isinstance(error, RequestError):
        return Outcome(failure=refusal(error))
    if isinstance(error, RowUnsuitable):
        return Outcome(failure=row_failure("unsuitable", str(error), BAD_REQUEST, None))
    return Outcome(failure=row_failure("invalid_request", f"cannot be sent as JSON: {error}", BAD_REQUEST, None))


def _unreadable(error: Exception) -> RowFailed:
    return RowFailed(f"the server's answer cannot be read: {_named(error)}", UNREADABLE)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _torchserve_error(body: bytes) -> Mapping[str, Any]:
    """Returns TorchServe's error object; empty if the body was written by the handler."""
    try:
        found = parse(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and {"code", "type", "message"} <= set(found) else {}


def _outputs(answer: bytes) -> list[dict[str, Any]]:
    """Returns the output tensors of a V2 reply. Raises RowFailed if the reply cannot be read."""
    try:
        return [
            {key: tensor[key] for key in ("name", "datatype", "shape", "parameters", "data") if key in tensor}
            for tensor in parse(answer)["outputs"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(error) from None
