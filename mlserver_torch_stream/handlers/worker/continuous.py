"""Continuous batching: calls the handler in a loop, each time with the requests that are in the batch.

Requests join between two calls and leave when their ``stopping_criteria`` ends them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mlserver_torch_stream.handlers.worker import values
from mlserver_torch_stream.handlers.worker.calls import add_prediction_time, failure, mismatch
from mlserver_torch_stream.handlers.worker.cancellation import NeverStop
from mlserver_torch_stream.handlers.worker.channel import Channel, SentPiece
from mlserver_torch_stream.handlers.worker.handler import Entry
from mlserver_torch_stream.handlers.worker.handler_context import FAILED, HandlerContext, Outlet, WorkerRequest

logger = logging.getLogger(__name__)


class Continuous:
    """The batch, and the requests that wait to join it.

    A call that raises is made again without the requests that joined in it, which then join one at a time. If that call
    raises too, each member is called alone. So a request that makes the handler raise fails alone.
    """

    def __init__(self, entry: Entry, context: HandlerContext, channel: Channel) -> None:
        self._entry = entry
        self._context = context
        self._channel = channel
        self._members: dict[str, WorkerRequest] = {}
        self._joining: deque[WorkerRequest] = deque()
        self._suspects: deque[WorkerRequest] = deque()  # join one at a time

    @property
    def busy(self) -> bool:
        return bool(self._members or self._joining or self._suspects)

    def join(self, requests: Sequence[WorkerRequest]) -> None:
        self._joining.extend(requests)

    def step(self) -> None:
        """One call of the handler."""
        self._remove_cancelled()
        joined = self._newcomers()
        batch = [*self._members.values(), *joined]
        if not batch:
            return
        error = self._call(batch)
        if error is None:
            return
        if len(batch) == 1:
            self._fail(batch[0], error)
        else:
            self._find_culprit(error, batch, joined)

    def _find_culprit(self, error: BaseException, batch: list[WorkerRequest], joined: list[WorkerRequest]) -> None:
        """Called after a call that raised; ``joined`` are the requests that joined in it."""
        members = [each for each in batch if each not in joined]
        if not joined or (members and self._call(members) is not None):
            self._each_alone(members)
            self._suspects.extend(joined)
        elif len(joined) == 1:
            self._fail(joined[0], error)
        else:
            self._suspects.extend(joined)

    def _each_alone(self, members: list[WorkerRequest]) -> None:
        for member in members:
            error = self._call([member])
            if error is not None:
                self._fail(member, error)

    def _newcomers(self) -> list[WorkerRequest]:
        if self._suspects:
            return [self._suspects.popleft()]
        joined = list(self._joining)
        self._joining.clear()
        return joined

    def _remove_cancelled(self) -> None:
        cancelled = [each for each in self._members.values() if self._channel.cancelled(each.id)]
        for waiting in (self._joining, self._suspects):
            for request in [each for each in waiting if self._channel.cancelled(each.id)]:
                waiting.remove(request)
                cancelled.append(request)
        for request in cancelled:
            self._over(request)

    def _call(self, batch: Sequence[WorkerRequest]) -> BaseException | None:
        """Calls the handler with a batch, and returns what it raises. Members that are not in the batch stay as they
        are."""
        context = self._context
        outlet = Outlet(batch, self._channel, NeverStop())
        began = time.monotonic()
        try:
            context.for_call(batch, outlet)
            returned = self._entry([request.data() for request in batch], context)
            trouble = mismatch(returned, len(batch))
            if trouble is None:
                add_prediction_time(context, began)
                pieces = [self._piece(index, request, returned[index]) for index, request in enumerate(batch)]
        except BaseException as error:
            logger.error("The handler failed", exc_info=error)
            return error
        if trouble is not None:  # the call is not made again, because the handler has advanced its state
            for request in batch:
                self._channel.failed([request.id], FAILED, trouble)
                self._over(request)
            return None
        given = [each for each in pieces if each is not None and each.request_id not in outlet.ended]
        staying = {each.request_id for each in given if not each.last}
        for request in batch:
            if request.id in staying:  # as in TorchServe, the handler gets a request's parts in the first call only
                self._members[request.id] = replace(request, parts=())
            else:
                self._members.pop(request.id, None)
        failed = self._channel.pieces(given, ended=[request.id for request in batch if request.id not in staying])
        for request in batch:
            if request.id in failed & staying:
                self._over(request)
        return None

    def _piece(self, index: int, request: WorkerRequest, value: Any) -> SentPiece | None:
        """None: the value cannot be sent, and the request has failed."""
        last = self._stops(index, value)
        try:
            return self._context.piece(index, value, last)
        except values.Unserialisable as error:
            self._channel.failed([request.id], FAILED, str(error))
            return None

    def _stops(self, index: int, value: Any) -> bool:
        """True for the last value. As in TorchServe, that is any value without a criterion or a verdict of it."""
        criteria = self._context.stopping_criteria
        verdict: bool | None = criteria[index](value) if criteria else None
        return verdict is None or verdict

    def _fail(self, request: WorkerRequest, error: BaseException) -> None:
        self._channel.failed([request.id], *failure(error))
        self._over(request)

    def _over(self, request: WorkerRequest) -> None:
        self._members.pop(request.id, None)
        self._channel.pieces((), ended=[request.id])


def run_steps(batch: Continuous, take: Callable[[bool], Sequence[WorkerRequest]]) -> None:
    """Runs for ever. ``take`` returns the requests that have arrived; ``take(True)`` waits for one."""
    while True:
        batch.join(take(not batch.busy))
        batch.step()
