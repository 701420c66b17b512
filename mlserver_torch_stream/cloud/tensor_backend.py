"""Lets any server of the V2 protocol infer objects, chunks or prompts as the elements of a BYTES tensor."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from mlserver_torch_stream.cloud.answers import answer_too_large, parse
from mlserver_torch_stream.cloud.endpoint import (
    FRAMES,
    JSON,
    UNREADABLE,
    UNSENDABLE,
    RowBackend,
    ServerEndpoint,
    row_failure,
    unreadable,
    unsent,
)
from mlserver_torch_stream.cloud.parse import MAX_ANSWER_BYTES, PREDICTIONS
from mlserver_torch_stream.cloud.requests import RowUnsuitable
from mlserver_torch_stream.cloud.rows import Kind, Outcome, Row

_PROMPT = "str"  # MLServer's content type of a text
_TEXT_TYPES = ("text/", "application/json")  # the beginnings of content types whose elements JSON can hold


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
        except UNSENDABLE:
            return []
        kinds = [(each.content_type, each.shared) for each in batch]
        return batch if len(batch) > 1 and all(each == kinds[0] for each in kinds) else []

    def _element(self, row: Row) -> _Element:
        """Returns the row's element: a prompt, unless the endpoint has ``objects``. Raises one of ``UNSENDABLE``."""
        if self.endpoint.objects is None and row.kind in (Kind.JSONL, Kind.TEXT):
            ask = self.endpoint.rows.ask(row)
            if ask.prompt is None:
                raise RowUnsuitable("a tensor holds a prompt, and cannot hold messages")
            return _Element(ask.prompt.encode(), _PROMPT, parameters := ask.v2_parameters, parameters)
        objects = self.endpoint.object_request
        return _Element(row.data, objects.content_type(row), objects.all_headers(row), objects.headers)

    async def _one(self, row: Row) -> Outcome:
        try:
            element = self._element(row)
        except UNSENDABLE as error:
            return unsent(error)
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
        except UNSENDABLE as error:
            return unsent(error)
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


def _outputs(answer: bytes) -> list[dict[str, Any]]:
    """Returns the output tensors of a V2 reply. Raises RowFailed if the reply cannot be read."""
    try:
        return [
            {key: tensor[key] for key in ("name", "datatype", "shape", "parameters", "data") if key in tensor}
            for tensor in parse(answer)["outputs"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise unreadable(error) from None
