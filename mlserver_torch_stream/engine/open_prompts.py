"""Prompts that come in pieces: which of them are open, and the memory in which they are prefilled ahead of their turn.

Knows nothing of rows or batches: an open prompt has none. Decides nothing about who else needs memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from mlserver_torch_stream.engine.request_state import RequestState


class OpenPrompts:
    """Each is billed for what has come of it, and gives its cache up when an admitted request needs the memory.

    ``cost``: bytes of a cache of (rows, columns). ``step``: to how many columns a growing cache is rounded up.
    """

    def __init__(self, cost: Callable[[int, int], int], step: Callable[[int], int]) -> None:
        self.requests: list[RequestState] = []
        self._cost = cost
        self._step = step
        self._columns: dict[
            RequestState, int
        ] = {}  # of the caches of requests that are not admitted, the idlest request first
        self._given_up: list[RequestState] = []

    @property
    def bytes(self) -> int:
        return sum(self._cost(1, columns) for columns in self._columns.values())

    def bytes_to_spare(self, busy: Collection[RequestState]) -> int:
        """What can be given up; a cache that a forward is writing to cannot."""
        return sum(self._cost(1, columns) for request, columns in self._columns.items() if request not in busy)

    def take_whole(self, busy: Collection[RequestState]) -> list[RequestState]:
        """Removes and returns those whose end has come. What was prefilled of another text is given up."""
        whole = [request for request in self.requests if request.sealed]
        self.requests = [request for request in self.requests if not request.sealed]
        for request in [
            request for request in self._columns if request.sealed and request.prefilled == 0 and request not in busy
        ]:
            self._give_up(request)
        return whole

    def reserve(self, request: RequestState, free: int) -> bool:
        """Takes memory for all that has come of a prompt, out of ``free`` bytes."""
        columns, held = self.columns(request), self._columns.get(request)
        if self._cost(1, columns) - (0 if held is None else self._cost(1, held)) > free:
            return False
        self._columns.pop(request, None)
        self._columns[request] = columns
        return True

    def columns(self, request: RequestState) -> int:
        """Of the cache that a prompt is prefilled in; an open one's grows by steps, so that it is not copied often."""
        return len(request.prompt) if request.sealed else self._step(len(request.prompt))

    def give_up(self, needed: int, busy: Collection[RequestState]) -> None:
        """Frees so many bytes, or all that it can."""
        for request in [request for request in self._columns if request not in busy]:
            if needed <= 0:
                return
            needed -= self._cost(1, self._columns[request])
            self._give_up(request)

    def _give_up(self, request: RequestState) -> None:
        del self._columns[request]
        self._given_up.append(request)
        request.prefilled = 0
        request.ahead = False  # else it would be prefilled again as soon as there is room, and given up again

    def take_given_up(self) -> list[RequestState]:
        """The requests that have lost their caches since the last call. They are prefilled again once admitted."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def remove(self, request: RequestState) -> None:
        """Of a request that was admitted, and pays for its cache itself from now on, or that has ended."""
        self._columns.pop(request, None)
        if request in self.requests:
            self.requests.remove(request)
