"""Calls a handler, for a batch or for each request alone. The handler's return value is the last piece of each
response.

This module imports ``ts``, so import it after ``provide_ts``.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ts.service import PredictionException

from mlserver_torch_stream.handlers.worker import values
from mlserver_torch_stream.handlers.worker.cancellation import ClientsLeft, NeverStop, StopAlone
from mlserver_torch_stream.handlers.worker.channel import Channel, SentPiece
from mlserver_torch_stream.handlers.worker.handler import Entry, described, text_of
from mlserver_torch_stream.handlers.worker.handler_context import FAILED, HandlerContext, Outlet, WorkerRequest

logger = logging.getLogger(__name__)
OUT_OF_RESOURCES = 507


class WrongResults(Exception):
    """Raised if the handler did not return a list with one result for each request."""


@dataclass(frozen=True)
class Caller:
    """Calls the handler for one batch at a time. ``stop`` decides whether a call ends early, at a send.

    ``responds`` is False on ranks other than the first, whose responses are not sent.
    """

    entry: Entry
    context: HandlerContext
    channel: Channel
    responds: bool = True
    stop: NeverStop = field(default_factory=StopAlone)

    def call(self, requests: Sequence[WorkerRequest]) -> None:
        """Calls the handler and sends its results; a failure is sent to the clients, not raised.

        Requests whose clients have disconnected before the call are left out.
        """
        all_ids = [request.id for request in requests]
        skipped = [each for each in all_ids if self.channel.cancelled(each)] if self.stop.skips else []
        left = [request for request in requests if request.id not in skipped]
        began = time.monotonic()
        pieces = self._pieces(left, began) if left else []
        self.channel.pieces(pieces, ended=all_ids, skipped=skipped, took=time.monotonic() - began if left else 0.0)

    def _pieces(self, requests: Sequence[WorkerRequest], began: float) -> list[SentPiece]:
        """Calls the handler, and returns the last pieces, which are not sent yet."""
        outlet = Outlet(requests, self.channel, self.stop)
        pieces: list[SentPiece] = []
        self.stop.begin()
        try:
            self.context.for_call(requests, outlet)
            returned = self.entry([request.data() for request in requests], self.context)
            self.channel.hold()  # the metric PredictionTime is sent with the answer
            add_prediction_time(self.context, began)
            if self.responds:
                pieces = answer(self.context, self.channel, returned, requests, outlet.ended)
        except ClientsLeft:
            pass
        except BaseException as error:
            logger.error("The handler failed", exc_info=error)
            if self.responds:
                left = [request.id for request in requests if request.id not in outlet.ended]
                self.channel.failed(left, *failure(error), retry=len(requests) > 1)
        self.stop.end()
        return pieces


def run_calls(caller: Caller, take: Callable[[bool], Sequence[WorkerRequest]]) -> None:
    """Calls the handler for batch after batch, forever. ``take(True)`` waits for the requests of the next batch."""
    while True:
        caller.call(take(True))


def answer(
    context: HandlerContext, channel: Channel, returned: Any, requests: Sequence[WorkerRequest], ended: Collection[str]
) -> list[SentPiece]:
    """Encodes the handler's results as the last pieces. A request whose result cannot be sent fails alone.

    Raises WrongResults if ``returned`` is not a list with one result for each request.
    """
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
    """Returns why the value is not a list of ``count`` results; None if it is."""
    if not isinstance(returned, list):
        return f"the handler returned a {type(returned).__name__} instead of a list"
    if len(returned) != count:
        return f"number of batch response mismatched: the handler returned {len(returned)} results for {count} requests"
    return None


def add_prediction_time(context: HandlerContext, began: float) -> None:
    """Adds TorchServe's metric ``PredictionTime``, in milliseconds since ``began``, a time of the monotonic clock."""
    context.metrics.add_time("PredictionTime", round((time.monotonic() - began) * 1000, 2))


def failure(error: BaseException) -> tuple[int, str]:
    """Returns TorchServe's status for an exception that a handler raised, and the message for the clients."""
    if isinstance(error, WrongResults):
        return FAILED, str(error)
    if isinstance(error, PredictionException):
        code = error.error_code
        return (code if isinstance(code, int) and 400 <= code < 600 else FAILED), text_of(error.message)
    out = isinstance(error, MemoryError) or "CUDA" in text_of(error)
    return (OUT_OF_RESOURCES if out else FAILED), f"the handler raised {described(error)}"


class Tasks:
    """Runs each request as a separate task on the handler's event loop, for models with ``asyncCommunication``.

    A task is cancelled as soon as its client disconnects; the failure of a task affects no other task. All methods run
    on the loop's thread, except ``start`` and ``cancel``, which other threads call.
    """

    def __init__(
        self, entry: Entry, context: HandlerContext, channel: Channel, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._entry = entry
        self._context = context
        self._channel = channel
        self._loop = loop
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, requests: Sequence[WorkerRequest]) -> None:
        """Starts a task for each request."""
        for request in requests:
            self._loop.call_soon_threadsafe(self._begin, request)

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Cancels the tasks of these requests; ids without a task are ignored."""
        for request_id in request_ids:
            self._loop.call_soon_threadsafe(self._stop, request_id)

    def _begin(self, request: WorkerRequest) -> None:
        self._tasks[request.id] = self._loop.create_task(self._answer(request))

    def _stop(self, request_id: str) -> None:
        task = self._tasks.get(request_id)
        if task is not None:
            self._loop.call_soon(task.cancel)  # not at once: the task must have started, or ``_answer`` never runs

    async def _answer(self, request: WorkerRequest) -> None:
        context, channel = copy.copy(self._context), self._channel  # the handler's own attributes are shared
        outlet = Outlet([request], channel, StopAlone())
        pieces: list[SentPiece] = []
        began = time.monotonic()
        try:
            context.for_call([request], outlet)
            returned = await self._entry([request.data()], context)
            add_prediction_time(context, began)
            pieces = answer(context, channel, returned, [request], outlet.ended)
        except ClientsLeft:
            pass
        except asyncio.CancelledError:
            if not channel.cancelled(request.id):
                channel.failed([request.id], FAILED, "the handler cancelled its own task")
        except BaseException as error:
            logger.error("The handler failed", exc_info=error)
            channel.failed([request.id] if request.id not in outlet.ended else [], *failure(error))
        finally:
            del self._tasks[request.id]
        channel.pieces(pieces, ended=[request.id])
