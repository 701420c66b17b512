"""One call of a handler for one batch: everybody gets pieces as they come, and the return value as the last.

Knows nothing of how batches are made, nor of batches that members join and leave.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlserver_torch_stream.torchserve.worker import values
from mlserver_torch_stream.torchserve.worker.cancellation import ClientsLeft, NeverStop, StopAlone
from mlserver_torch_stream.torchserve.worker.channel import Channel, SentPiece
from mlserver_torch_stream.torchserve.worker.failures import FAILED, WrongResults, failure
from mlserver_torch_stream.torchserve.worker.handler import Entry
from mlserver_torch_stream.torchserve.worker.handler_context import HandlerContext, Outlet, WorkerRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Caller:
    """``speaks``: False on ranks whose answers nobody waits for. ``stop``: whether a call may end at a send."""

    entry: Entry
    context: HandlerContext
    channel: Channel
    speaks: bool = True
    stop: NeverStop = field(default_factory=StopAlone)

    def call(self, requests: Sequence[WorkerRequest]) -> None:
        """Never raises but for what ends the process."""
        outlet = Outlet(requests, self.channel, self.stop)
        self.stop.begin()
        pieces: list[SentPiece] = []
        try:
            pieces = self._results(requests, outlet)
        except ClientsLeft:
            pass
        except BaseException as error:
            self._failed(error, outlet, requests)
        self.stop.end()
        self.channel.pieces(pieces, ended=[request.id for request in requests])

    def _results(self, requests: Sequence[WorkerRequest], outlet: Outlet) -> list[SentPiece]:
        """The last pieces. Raises whatever the handler does, and WrongResults."""
        context = self.context
        context.for_call(requests, outlet)
        began = time.monotonic()
        returned = self.entry([request.data() for request in requests], context)
        add_prediction_time(context, began)
        return answer(context, self.channel, returned, requests, outlet.ended) if self.speaks else []

    def _failed(self, error: BaseException, outlet: Outlet, requests: Sequence[WorkerRequest]) -> None:
        logger.error("The handler failed", exc_info=error)
        if self.speaks:
            status, message = failure(error)
            left = [request.id for request in requests if request.id not in outlet.ended]
            self.channel.failed(left, status, message, again=len(requests) > 1)


def answer(
    context: HandlerContext, channel: Channel, returned: Any, requests: Sequence[WorkerRequest], ended: Collection[str]
) -> list[SentPiece]:
    """The last pieces out of what a handler returned; what cannot be sent has failed, alone. Raises WrongResults."""
    left = [index for index, request in enumerate(requests) if request.id not in ended]
    trouble = mismatch(returned, len(requests))
    if trouble is not None:
        raise WrongResults(trouble)
    pieces = []
    for index in left:
        try:
            pieces.append(context.piece(index, returned[index], last=True))
        except values.Unserialisable as error:
            channel.failed([requests[index].id], FAILED, str(error))
    return pieces


def mismatch(returned: Any, count: int) -> str | None:
    """Why this is no list of so many results."""
    if not isinstance(returned, list):
        return f"the handler returned a {type(returned).__name__} instead of a list"
    if len(returned) != count:
        return f"number of batch response mismatched: the handler returned {len(returned)} results for {count} requests"
    return None


def add_prediction_time(context: HandlerContext, began: float) -> None:
    context.metrics.add_time("PredictionTime", round((time.monotonic() - began) * 1000, 2))
