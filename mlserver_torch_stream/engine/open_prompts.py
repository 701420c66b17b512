"""Keeps account of open prompts, which are not whole yet, and of the memory in which they are prefilled.

Knows nothing of batches: an open prompt is in none. Does not decide when other requests need its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from mlserver_torch_stream.engine.request_state import RequestState


class OpenPrompts:
    """Reserves memory for the ids of each open prompt, and frees it when an admitted request needs it.

    ``cost`` returns the bytes of a cache of (rows, columns); ``step`` rounds up the columns of a growing cache.
    """

    def __init__(self, cost: Callable[[int, int], int], step: Callable[[int], int]) -> None:
        self.requests: list[RequestState] = []
        self._cost = cost
        self._step = step
        # Columns of the caches of requests that are not admitted; the request that grew least recently is first.
        self._columns: dict[RequestState, int] = {}
        self._given_up: list[RequestState] = []

    @property
    def bytes(self) -> int:
        return sum(self._cost(1, columns) for columns in self._columns.values())

    def bytes_to_spare(self, busy: Collection[RequestState]) -> int:
        """Returns how many bytes can be freed. The cache of a ``busy`` request cannot: a forward writes to it."""
        return sum(self._cost(1, columns) for request, columns in self._columns.items() if request not in busy)

    def take_whole(self, busy: Collection[RequestState]) -> list[RequestState]:
        """Removes and returns the prompts that are whole now. Frees the caches whose ids are no prefix of them."""
        whole = [request for request in self.requests if request.sealed]
        self.requests = [request for request in self.requests if not request.sealed]
        for request in [
            request for request in self._columns if request.sealed and request.prefilled == 0 and request not in busy
        ]:
            self._give_up(request)
        return whole

    def reserve(self, request: RequestState, free: int) -> bool:
        """Reserves memory for a prompt's ids so far, out of ``free`` bytes. Returns False if that is too little."""
        columns, held = self.columns(request), self._columns.get(request)
        if self._cost(1, columns) - (0 if held is None else self._cost(1, held)) > free:
            return False
        self._columns.pop(request, None)
        self._columns[request] = columns
        return True

    def columns(self, request: RequestState) -> int:
        """Returns the columns of a prompt's cache. Those of an open prompt grow by steps: copies of it are rare."""
        return len(request.prompt) if request.sealed else self._step(len(request.prompt))

    def give_up(self, needed: int, busy: Collection[RequestState]) -> None:
        """Frees so many bytes, or as many as it can."""
        for request in [request for request in self._columns if request not in busy]:
            if needed <= 0:
                return
            needed -= self._cost(1, self._columns[request])
            self._give_up(request)

    def _give_up(self, request: RequestState) -> None:
        del self._columns[request]
        self._given_up.append(request)
        request.prefilled = 0
        request.ahead = False  # otherwise it would be prefilled and freed again and again

    def take_given_up(self) -> list[RequestState]:
        """Returns the requests that lost their caches since the last call. Once admitted they are prefilled again."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def remove(self, request: RequestState) -> None:
        """Forgets a request that has ended or was admitted: the scheduler accounts for an admitted one."""
        self._columns.pop(request, None)
        if request in self.requests:
            self.requests.remove(request)
