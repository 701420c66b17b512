"""The context and the metrics that a handler gets: subclasses of TorchServe's, which send through our channel.

This module imports ``ts``, the package or the shim, so import it after ``provide_ts``.
"""

from __future__ import annotations

import logging
import operator
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Callable, Dict

from ts.context import Context, RequestProcessor
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl

from mlserver_torch_stream.handlers.worker import values
from mlserver_torch_stream.handlers.worker.cancellation import NeverStop
from mlserver_torch_stream.handlers.worker.channel import STREAM_NEXT, Channel, SentPiece
from mlserver_torch_stream.handlers.worker.handler import described

logger = logging.getLogger(__name__)
_INT = struct.Struct("!i")
_ERROR = "error"  # as in TorchServe, the value of a response without results
FAILED = 503


@dataclass(frozen=True)
class Response:
    """A message that a TorchServe worker sends to the frontend, with a piece for each of several requests."""

    code: int
    message: str
    pieces: list[SentPiece]


def parse(message: bytes | bytearray) -> Response:
    """Parses a message in TorchServe's binary format. Raises ValueError if the message is incomplete."""
    cursor = _Cursor(memoryview(message))
    code = cursor.integer()
    text = cursor.text()
    pieces = []
    while (length := cursor.integer()) >= 0:
        request_id = cursor.take(length).decode()
        content_type = cursor.text()
        status = cursor.integer()
        cursor.text()  # the reason phrase is skipped, since none of our protocols has one
        headers = {cursor.text(): cursor.text() for _ in range(cursor.integer())}
        value = cursor.take(cursor.integer())
        last = headers.get(STREAM_NEXT) == "false"
        pieces.append(SentPiece(request_id, value, last, content_type, status, headers))
    return Response(code, text, pieces)


class _Cursor:
    def __init__(self, message: memoryview) -> None:
        self._message = message
        self._position = 0

    def integer(self) -> int:
        return int(_INT.unpack(self.take(_INT.size))[0])

    def text(self) -> str:
        return self.take(self.integer()).decode()

    def take(self, length: int) -> bytes:
        end = self._position + length
        if length < 0 or end > len(self._message):
            raise ValueError("the response is incomplete")
        taken = bytes(self._message[self._position : end])
        self._position = end
        return taken


@dataclass
class WorkerRequest:
    """One request as it arrived. Each of its ``parts`` is a name, a content type and a value."""

    id: str
    headers: Mapping[str, str]
    parts: Sequence[tuple[str, str, bytes]]

    def data(self) -> dict[str, Any]:
        """Returns the request as a handler gets it: the decoded value of each part, by name."""
        return {name: values.decode(value, content_type) for name, content_type, value in self.parts}

    def processor(self) -> RequestProcessor:
        """Returns the object that has the request's headers, and on which the handler sets its response's status and
        headers.
        """
        parts = {name: {"content-type": content_type} for name, content_type, _ in self.parts}
        return RequestProcessor(_Headers({**parts, **self.headers}))


class _Headers(Dict[str, Any]):
    """Headers whose names are in lower case; as in TorchServe, a handler may look them up in any case."""

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, super().get(key.lower(), default))

    def __missing__(self, key: str) -> Any:
        if key == key.lower():
            raise KeyError(key)
        return self[key.lower()]


class HandlerContext(Context):  # type: ignore[misc]
    """The context of a handler in a worker.

    If a handler sets the header ``ts_stream_next`` to "false" before it sends a piece, that piece is the last.
    """

    def for_call(self, requests: Sequence[WorkerRequest], outlet: Outlet) -> None:
        """Prepares the context for one call with these requests; the call's pieces go through ``outlet``."""
        self._ids = [request.id for request in requests]  # the handler may change ``request_ids``
        self.request_ids = dict(enumerate(self._ids))
        self.request_processor = [request.processor() for request in requests]
        self.metrics.request_ids = self.request_ids
        self.stopping_criteria = None
        self.cl_socket = outlet
        self._ending: set[int] = set()

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        if key == STREAM_NEXT:
            if value == "false":
                self._ending.add(idx)
            elif idx in self._ending:
                value = "false"
        super().set_response_header(idx, key, value)

    def send_intermediate(self, ret: Any, req_id_map: Mapping[int, str], message: str, code: int) -> None:
        """Sends a piece of each request's answer. If a value cannot be sent, only its request fails.

        ``ret`` holds the values by the request's index, as a list or a dict; with None each piece reports an error.
        Raises ClientsLeft if all clients have disconnected, and TypeError if ``code`` is not an integer.
        """
        if os.getenv("LOCAL_RANK", "0") != "0":  # other ranks send nothing, but a call may end at their sends too
            self.cl_socket.send(None)
            return
        response = Response(operator.index(code), message, [])
        for index, request_id in req_id_map.items():
            if isinstance(ret, dict) and index not in ret:
                continue
            self.set_response_header(index, STREAM_NEXT, "true")
            last = self.get_response_headers(index)[STREAM_NEXT] == "false"
            value = _ERROR if ret is None else ret[index]
            try:
                response.pieces.append(self.piece(index, value, last, request_id))
            except values.Unserialisable as error:
                self.cl_socket.fail([request_id], FAILED, str(error))
        self.cl_socket.send(response)

    def piece(self, index: int, value: Any, last: bool, request_id: str | None = None) -> SentPiece:
        """Encodes the value for the request at ``index``, or for ``request_id`` if it is given.

        Raises values.Unserialisable if the value cannot be sent, or if the handler has damaged the context.
        """
        try:
            status, _ = self.get_response_status(index)
            headers = {str(name): str(text) for name, text in self.get_response_headers(index).items()}
            content_type = str(self.get_response_content_type(index) or "")
            encoded = values.encode(value)
            return SentPiece(request_id or self._ids[index], encoded, last, content_type, int(status or 200), headers)
        except values.Unserialisable:
            raise
        except BaseException as error:
            raise values.Unserialisable(f"the handler's result cannot be sent: {described(error)}") from error


class Outlet:
    """Sends the pieces of one call. As ``context.cl_socket`` it accepts the messages that the ``ts`` package writes."""

    def __init__(self, requests: Sequence[WorkerRequest], channel: Channel, stop: NeverStop) -> None:
        self._channel = channel
        self._stop = stop
        self._ids = frozenset(request.id for request in requests)
        self.ended: set[str] = set()  # the ids of the requests whose last piece was sent

    def sendall(self, message: bytes | bytearray | None) -> None:
        """Sends a message that is encoded in TorchServe's binary format. Raises ClientsLeft if no client waits any
        more.
        """
        self.send(None if message is None else parse(message))

    def fail(self, request_ids: Sequence[str], status: int, message: str) -> None:
        """Reports that requests have failed, with TorchServe's status and a message for the clients."""
        failed = [each for each in request_ids if each not in self.ended]
        self._channel.failed(failed, status, message)
        self.ended.update(failed)

    def send(self, response: Response | None) -> None:
        """Sends a response, which is None on ranks other than the first. Raises ClientsLeft if no client waits any
        more.
        """
        if response is None:
            self._stop.sent(left=False)
            return
        if response.code != 200:
            self.fail([each.request_id for each in response.pieces], response.code, response.message)
        else:
            pieces = [each for each in response.pieces if self._wanted(each.request_id)]
            self.ended.update(piece.request_id for piece in pieces if piece.last)
            self.ended |= self._channel.pieces(pieces)
        waiting = self._ids - self.ended
        self._stop.sent(left=bool(waiting) and all(map(self._channel.cancelled, waiting)))

    def _wanted(self, request_id: str) -> bool:
        return request_id in self._ids and request_id not in self.ended and not self._channel.cancelled(request_id)


@lru_cache(maxsize=256)
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """Returns the pattern of a metric's dimensions. They are not split at commas, which a value may contain."""
    return re.compile(",".join(f"{re.escape(name)}:(.*?)" for name in names), re.DOTALL)


class Metrics(MetricsCacheYamlImpl):  # type: ignore[misc]
    """``context.metrics``: TorchServe's store, except that values are sent to the server, not to the log.

    ``config`` is the content of ``metrics.yaml``, which the server has read, because this interpreter may have no YAML
    parser.
    """

    def __init__(self, channel: Channel, model_name: str, config: Mapping[str, Any]) -> None:
        self._config = config
        self._channel = channel
        super().__init__(config_file_path="")
        self.initialize_cache()
        # No request exists while the handler loads, and TorchServe logs an error for a metric without request ids.
        self.set_request_ids(model_name)
        self.model_name = model_name

    def _parse_yaml_file(self, config_file_path: str) -> None:
        self._parsed_file = self._config

    def add_metric_to_cache(self, *args: Any, **options: Any) -> Any:
        metric = super().add_metric_to_cache(*args, **options)
        metric.emit_metrics = partial(self._emit, metric)
        metric.add_or_update = partial(self._add_number, metric.metric_name, metric.add_or_update)
        return metric

    def _add_number(self, name: str, add: Callable[..., object], value: Any, *args: Any, **options: Any) -> None:
        """Adds a value. If it is not a number, it is only logged, so that no request fails because of a metric."""
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            logger.error("Metric %s: %r is not a number", name, value)
            return
        add(number, *args, **options)

    def _emit(self, metric: Any, request_id: str, value: float, dimension_string: str) -> None:
        names = metric.dimension_names or []
        values = _pattern(tuple(names)).fullmatch(dimension_string)
        self._channel.send(
            "metric",
            name=str(metric.metric_name),
            type=metric.metric_type.value,
            value=value,
            labels=dict(zip(names, values.groups())) if values else {},
        )
