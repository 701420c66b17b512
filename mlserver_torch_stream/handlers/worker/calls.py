"""Calls a handler, whose return value is the last piece of each response: for a batch, or for each request alone.

Import it when ``ts`` can be imported.
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
    """The handler did not return a list with one result for each request."""


@dataclass(frozen=True)
class Caller:
    """``responds``: False on ranks whose responses are not sent. ``stop``: whether a call may end at a send."""

    entry: Entry
    context: HandlerContext
    channel: Channel
    responds: bool = True
    stop: NeverStop = field(default_factory=StopAlone)

    def call(self, requests: Sequence[WorkerRequest]) -> None:
        """Raises nothing. A request whose client has left before the call is no part of it."""
        all_ids = [request.id for request in requests]
        skipped = [each for each in all_ids if self.channel.cancelled(each)] if self.stop.skips else []
        left = [request for request in requests if request.id not in skipped]
        began = time.monotonic()
        pieces = self._pieces(left, began) if left else []
        self.channel.pieces(pieces, ended=all_ids, skipped=skipped, took=time.monotonic() - began if left else 0.0)

    def _pieces(self, requests: Sequence[WorkerRequest], began: float) -> list[SentPiece]:
        """Makes the call. Returns the last pieces, which are not sent yet."""
        outlet = Outlet(requests, self.channel, self.stop)
        pieces: list[SentPiece] = []
        self.stop.begin()
        try:
            self.context.for_call(requests, outlet)
            returned = self.entry([request.data() for request in requests], self.context)
            self.channel.hold()  # the time of the prediction leaves with the answer
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
    """Runs for ever. ``take(True)`` waits for the requests of the next batch."""
    while True:
        caller.call(take(True))


def answer(
    context: HandlerContext, channel: Channel, returned: Any, requests: Sequence[WorkerRequest], ended: Collection[str]
) -> list[SentPiece]:
    """The last pieces, made of the handler's results. A request whose result cannot be sent fails alone.

    Raises WrongResults.
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
    """Why the value is no list of ``count`` results; None if it is one."""
    if not isinstance(returned, list):
        return f"the handler returned a {type(returned).__name__} instead of a list"
    if len(returned) != count:
        return f"number of batch response mismatched: the handler returned {len(returned)} results for {count} requests"
    return None


def add_prediction_time(context: HandlerContext, began: float) -> None:
    """Adds TorchServe's metric ``PredictionTime``, in milliseconds since ``began``, a time of the monotonic clock."""
    context.metrics.add_time("PredictionTime", round((time.monotonic() - began) * 1000, 2))


def failure(error: BaseException) -> tuple[int, str]:
    """TorchServe's status for an exception that a handler raised, and a message for the clients."""
    if isinstance(error, WrongResults):
        return FAILED, str(error)
    if isinstance(error, PredictionException):
        code = error.error_code
        return (code if isinstance(code, int) and 400 <= code < 600 else FAILED), text_of(error.message)
    out = isinstance(error, MemoryError) or "CUDA" in text_of(error)
    return (OUT_OF_RESOURCES if out else FAILED), f"the handler raised {described(error)}"


class Tasks:
    """Runs each request as a task of its own on the handler's event loop, where the model sets ``asyncCommunication``.

    A task is cancelled as soon as its client disconnects, and a task that fails fails alone. All methods run on the
    loop's thread, except ``start`` and ``cancel``, which other threads call.
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
        for request in requests:
            self._loop.call_soon_threadsafe(self._begin, request)

    def cancel(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._loop.call_soon_threadsafe(self._stop, request_id)

    def _begin(self, request: WorkerRequest) -> None:
        self._tasks[request.id] = self._loop.create_task(self._answer(request))

    def _stop(self, request_id: str) -> None:
        task = self._tasks.get(request_id)
        if task is not None:
            self._loop.call_soon(task.cancel)  # after the task's first step, without which ``_answer`` would not begin

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
