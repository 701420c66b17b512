"""The context that a handler gets: TorchServe's own, whose socket leads to our channel.

Knows nothing of batching. Import it when ``ts`` can be imported: the class is the package's, or the shim's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ts.context import Context, RequestProcessor

from mlserver_torch_stream.torchserve.worker import values
from mlserver_torch_stream.torchserve.worker.cancellation import NeverStop
from mlserver_torch_stream.torchserve.worker.channel import Channel, SentPiece
from mlserver_torch_stream.torchserve.worker.handler import described
from mlserver_torch_stream.torchserve.worker.wire import Prediction, parse

STREAM_NEXT = "ts_stream_next"
_OURS = {STREAM_NEXT, "content-type"}


@dataclass(frozen=True)
class WorkerRequest:
    """One request, as it came. ``parts``: name, content type and value of each."""

    id: str
    headers: Mapping[str, str]
    parts: Sequence[tuple[str, str, bytes]]

    def data(self) -> dict[str, Any]:
        return {name: values.decode(value, content_type) for name, content_type, value in self.parts}

    def processor(self) -> RequestProcessor:
        parts = {name: {"content-type": content_type} for name, content_type, _ in self.parts}
        return RequestProcessor({**parts, **self.headers})


class HandlerContext(Context):  # type: ignore[misc]
    """``ts_stream_next`` set to "false" by the handler itself, before it sends a piece, makes that piece the last."""

    def for_call(self, requests: Sequence[WorkerRequest], outlet: Outlet) -> None:
        """Prepares for one call; what it gives goes through the outlet."""
        self._ids = [request.id for request in requests]  # the handler may do with its own ones what it likes
        self.request_ids = dict(enumerate(self._ids))
        self.request_processor = [request.processor() for request in requests]
        self.metrics.request_ids = self.request_ids
        self.stopping_criteria = None
        self.cl_socket = outlet
        self._ending: set[int] = set()

    def copy(self) -> HandlerContext:
        """For a call beside others; free attributes are shared."""
        return copy.copy(self)

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        if key == STREAM_NEXT:
            if value == "false":
                self._ending.add(idx)
            elif idx in self._ending:
                value = "false"
        super().set_response_header(idx, key, value)

    def piece(self, index: int, value: Any, last: bool) -> SentPiece:
        """Raises values.Unserialisable, whatever the handler has made of its context and its values."""
        try:
            status, _ = self.get_response_status(index)
            headers = self.get_response_headers(index)
            content_type = str(self.get_response_content_type(index) or "")
            encoded = values.encode(value)
            return SentPiece(self._ids[index], encoded, last, content_type, int(status or 200), _told(headers))
        except values.Unserialisable:
            raise
        except BaseException as error:
            raise values.Unserialisable(f"the handler's result cannot be sent: {described(error)}") from error


class Outlet:
    """``context.cl_socket``: understands what TorchServe would send to its frontend."""

    def __init__(self, requests: Sequence[WorkerRequest], channel: Channel, stop: NeverStop) -> None:
        self._channel = channel
        self._stop = stop
        self._ids = frozenset(request.id for request in requests)
        self.ended: set[str] = set()  # have had their last piece

    def sendall(self, message: bytes | bytearray | None) -> None:
        """Raises ClientsLeft."""
        if message is None:  # a rank that does not speak
            self._stop.sent(left=False)
            return
        response = parse(message)
        if response.code != 200:
            failed = [each.request_id for each in response.predictions if each.request_id not in self.ended]
            self._channel.failed(failed, response.code, response.message)
            self.ended.update(failed)
        else:
            pieces = [self._piece(each) for each in response.predictions if self._wanted(each.request_id)]
            self.ended.update(piece.request_id for piece in pieces if piece.last)
            self.ended |= self._channel.pieces(pieces)
        waiting = self._ids - self.ended
        self._stop.sent(left=bool(waiting) and all(map(self._channel.gone, waiting)))

    def _wanted(self, request_id: str) -> bool:
        return request_id in self._ids and request_id not in self.ended and not self._channel.gone(request_id)

    @staticmethod
    def _piece(given: Prediction) -> SentPiece:
        last = given.headers.get(STREAM_NEXT) == "false"
        return SentPiece(given.request_id, given.value, last, given.content_type, given.status, _told(given.headers))


def _told(headers: Mapping[str, str]) -> dict[str, str]:
    return {str(name): str(value) for name, value in headers.items() if name not in _OURS}
