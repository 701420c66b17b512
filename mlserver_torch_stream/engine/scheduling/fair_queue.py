"""Orders the waiting requests: by priority, then by fair shares between clients.

Decides nothing about memory; it reads no clock and imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

from mlserver_torch_stream.engine.request_state import RequestState

# How many later requests may be admitted before one that does not fit yet. Then all requests wait for that one.
_MOST_OVERTAKEN = 16
_MOST_TRIED = 16  # per admission: a long queue costs a step no more than a short one


class FairQueue:
    """Start-time fair queueing with one flow per request, whose weight falls with its client's backlog.

    A request's tag is the virtual time plus its work (the tokens that it can need) times the number of requests that
    its client has in the queue; the lowest tag goes first. So a short request passes earlier long ones, and a client
    that floods the queue passes no other. The virtual time grows with each admission, so no request waits for ever.
    """

    def __init__(self) -> None:
        self._tags: dict[RequestState, float] = {}  # in the order of arrival
        self._overtaken: Counter[RequestState] = Counter()
        self._backlog: Counter[str] = Counter()
        self._virtual_time = 0.0
        self.tokens = 0  # of the prompts

    def __len__(self) -> int:
        return len(self._tags)

    def __iter__(self) -> Iterator[RequestState]:
        """Yields the requests in the order in which admission tries them."""
        return iter(sorted(self._tags, key=lambda request: (request.priority, self._tags[request])))

    def __contains__(self, request: RequestState) -> bool:
        return request in self._tags

    def has_before(self, priority: float) -> bool:
        """Whether a request of a higher priority, which is a lower number, waits."""
        return any(request.priority < priority for request in self._tags)

    def add(self, request: RequestState) -> None:
        self._backlog[request.client] += 1
        self._tags[request] = self._virtual_time + request.work * self._backlog[request.client]
        self.tokens += len(request.prompt)

    def remove(self, request: RequestState) -> None:
        del self._tags[request]
        self._overtaken.pop(request, None)
        self.tokens -= len(request.prompt)
        self._backlog[request.client] -= 1
        if not self._backlog[request.client]:
            del self._backlog[request.client]

    def admit(self, fits: Callable[[RequestState], bool]) -> RequestState | None:
        """Removes and returns the first request that ``fits``.

        Returns None if there is none, or if an earlier request was overtaken too often.
        """
        passed: list[RequestState] = []
        for request in islice(self, _MOST_TRIED):
            if fits(request):
                self._overtaken.update(passed)
                self._virtual_time = max(self._virtual_time, self._tags[request])
                self.remove(request)
                return request
            if self._overtaken[request] >= _MOST_OVERTAKEN:
                return None
            passed.append(request)
        return None
