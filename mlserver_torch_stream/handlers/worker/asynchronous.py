"""Runs each request as a separate task on the handler's event loop, where the model sets ``asyncCommunication``.

A task is cancelled as soon as its client disconnects, and a task that fails fails alone.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Sequence

from mlserver_torch_stream.handlers.worker.calls import add_prediction_time, answer, failure
from mlserver_torch_stream.handlers.worker.cancellation import ClientsLeft, StopAlone
from mlserver_torch_stream.handlers.worker.channel import Channel, SentPiece
from mlserver_torch_stream.handlers.worker.handler import Entry
from mlserver_torch_stream.handlers.worker.handler_context import FAILED, HandlerContext, Outlet, WorkerRequest

logger = logging.getLogger(__name__)


class Tasks:
    """All methods run on the loop's thread, except ``start`` and ``cancel``, which other threads call."""

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
