"""Continuous batching: the handler is called again and again, each time with whoever is in the batch.

Members join between two calls and leave when their ``stopping_criteria`` says so. Knows nothing of how many may be in:
the server sends no more than fit.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mlserver_torch_stream.torchserve.worker import values
from mlserver_torch_stream.torchserve.worker.calls import add_prediction_time, mismatch
from mlserver_torch_stream.torchserve.worker.cancellation import NeverStop
from mlserver_torch_stream.torchserve.worker.channel import Channel, SentPiece
from mlserver_torch_stream.torchserve.worker.failures import FAILED, failure
from mlserver_torch_stream.torchserve.worker.handler import Entry
from mlserver_torch_stream.torchserve.worker.handler_context import HandlerContext, Outlet, WorkerRequest

logger = logging.getLogger(__name__)


class Continuous:
    """The batch and who waits to join it.

    A call that raises is made again without those who joined in it, who then join one at a time; where that raises too,
    with each member alone. So whoever makes it raise fails alone.
    """

    def __init__(self, entry: Entry, context: HandlerContext, channel: Channel) -> None:
        self._entry = entry
        self._context = context
        self._channel = channel
        self._members: list[WorkerRequest] = []
        self._joining: deque[WorkerRequest] = deque()
        self._suspects: deque[WorkerRequest] = deque()  # join one at a time

    @property
    def busy(self) -> bool:
        return bool(self._members or self._joining or self._suspects)

    def join(self, requests: Sequence[WorkerRequest]) -> None:
        self._joining.extend(requests)

    def step(self) -> None:
        """One call of the handler."""
        self._let_go()
        joined = self._newcomers()
        batch = [*self._members, *joined]
        if not batch:
            return
        error = self._call(batch)
        if error is None:
            return
        if len(batch) == 1:
            self._fail(batch[0], error)
        else:
            self._find_who(error, batch, joined)

    def _find_who(self, error: BaseException, batch: list[WorkerRequest], joined: list[WorkerRequest]) -> None:
        """After a call that raised, with whoever joined in it."""
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

    def _let_go(self) -> None:
        """Whose client has left takes part no more."""
        for group in (self._members, self._joining, self._suspects):
            for request in [each for each in group if self._channel.gone(each.id)]:
                group.remove(request)
                self._channel.pieces((), ended=[request.id])

    def _call(self, batch: Sequence[WorkerRequest]) -> BaseException | None:
        """The members that are left of a batch stay; those that are not in it are not touched."""
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
        if trouble is not None:  # not made again: the step has advanced members that it has no results for
            for request in batch:
                self._channel.failed([request.id], FAILED, trouble)
                self._over(request)
            return None
        given = [each for each in pieces if each is not None and each.request_id not in outlet.ended]
        staying = {each.request_id for each in given if not each.last}
        for request in batch:
            self._stay(request) if request.id in staying else self._remove(request)
        failed = self._channel.pieces(given, ended=[request.id for request in batch if request.id not in staying])
        for request in batch:
            if request.id in failed & staying:
                self._over(request)
        return None

    def _piece(self, index: int, request: WorkerRequest, value: Any) -> SentPiece | None:
        """None: it cannot be sent, and has failed."""
        last = self._stops(index, value)
        try:
            return self._context.piece(index, value, last)
        except values.Unserialisable as error:
            self._channel.failed([request.id], FAILED, str(error))
            return None

    def _stops(self, index: int, value: Any) -> bool:
        """Without a criterion, or where it says None, a returned value is the last, as TorchServe has it."""
        criteria = self._context.stopping_criteria
        verdict: bool | None = criteria[index](value) if criteria else None
        return verdict is None or verdict

    def _stay(self, request: WorkerRequest) -> None:
        """What the handler has seen of a request it is not shown again, as TorchServe does it."""
        seen = replace(request, parts=())
        for index, member in enumerate(self._members):
            if member.id == request.id:
                self._members[index] = seen
                return
        self._members.append(seen)

    def _fail(self, request: WorkerRequest, error: BaseException) -> None:
        status, message = failure(error)
        self._channel.failed([request.id], status, message)
        self._over(request)

    def _over(self, request: WorkerRequest) -> None:
        self._remove(request)
        self._channel.pieces((), ended=[request.id])

    def _remove(self, request: WorkerRequest) -> None:
        self._members = [each for each in self._members if each.id != request.id]


def run_steps(batch: Continuous, take: Callable[[bool], Sequence[WorkerRequest]]) -> None:
    """For ever. ``take`` gives the requests that have come; told so, it waits for one."""
    while True:
        batch.join(take(not batch.busy))
        batch.step()
