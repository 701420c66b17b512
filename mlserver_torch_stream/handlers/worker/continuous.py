"""Continuous batching: calls the handler in a loop, each time with the requests that are in the batch then.

A request joins between two calls, and leaves when its ``stopping_criteria`` says so.
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

    If a call raises, only the request that caused it should fail. So the call is repeated without the requests that had
    just joined, and these then join one at a time. If the repeated call raises, too, the handler is called for each
    request alone.
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
        """True if a request is in the batch or waits to join it."""
        return bool(self._members or self._joining or self._suspects)

    def join(self, requests: Sequence[WorkerRequest]) -> None:
        """Adds requests, which join the batch at the next step."""
        self._joining.extend(requests)

    def step(self) -> None:
        """Lets waiting requests join, and calls the handler once."""
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
        """Repeats a call that raised ``error``, to find the request that caused it; ``joined`` had just joined."""
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
        """Calls the handler with ``batch``, and returns the exception that it raises, or None.

        Requests outside ``batch`` keep their state.
        """
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
        if trouble is not None:  # no repetition, because the handler has advanced its state
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
        """Encodes a request's value; returns None if it cannot be sent, after failing the request."""
        last = self._stops(index, value)
        try:
            return self._context.piece(index, value, last)
        except values.Unserialisable as error:
            self._channel.failed([request.id], FAILED, str(error))
            return None

    def _stops(self, index: int, value: Any) -> bool:
        """Whether the value is the request's last one.

        As in TorchServe, it is the last one if no criterion is set, or if the criterion returns None.
        """
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
    """Calls the handler again and again, forever.

    ``take`` returns the requests that have arrived; ``take(True)`` waits for one.
    """
    while True:
        batch.join(take(not batch.busy))
        batch.step()
