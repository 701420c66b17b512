"""Decides when an item of a batch may run. One slot stays free for clients, and no item starts while clients' prompts
wait.

A client's prompt has to wait until the running step ends. To keep steps short while clients are active, one item is
prefilled at a time and only a few items are decoded. Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque

from mlserver_torch_stream.generation import RequestObserver, RequestObservers
from mlserver_torch_stream.server.observability.request_observer import ClientLoad
from mlserver_torch_stream.types import GenerationRequest, TokenEvent

# The share of the slots for items while clients are active. With a quarter of 32 slots the time to a first token was
# 1.59 times that without a batch, with an eighth 1.36 times (make bench, two cores with AMX). The embedded model's step
# takes 13.6 ms for 1 sequence, 17 for 8 and 30 for 31 (benchmarks/LOG.md), compared with 57 ms until the first token of
# a prompt of 128 tokens.
_SHARE = 1 / 8
_PATIENCE_S = 60.0  # even if clients are always active, a batch starts an item in this time


class ItemSlots:
    """The ``slots`` slots of one model. Items start in the order in which they asked for slots.

    An item is overdue when it has waited ``patience_s`` seconds because of clients while no other item ran. It then no
    longer gives way to clients.
    """

    def __init__(self, model: str, slots: int, clients: ClientLoad, patience_s: float = _PATIENCE_S) -> None:
        self._model = model
        self._slots = slots
        self._clients = clients
        self._patience_s = patience_s
        self._waiting: deque[ItemTurn] = deque()
        self._running: set[ItemTurn] = set()
        self._timer: asyncio.TimerHandle | None = None  # fires when the first waiting item becomes overdue
        self._listens = False  # True: changes of the clients' load are watched, because items wait

    def ask(self, sequences: int) -> ItemTurn:
        """Queues an item with this number of sequences, and returns its turn."""
        turn = ItemTurn(self, sequences)
        self._waiting.append(turn)
        self.look()
        return turn

    def look(self) -> None:
        """Starts waiting items, as far as clients leave slots free."""
        while self._waiting and self._may_start(self._waiting[0].sequences):
            self._let_in()
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._lose_patience)
        if self._listens != bool(self._waiting):
            self._listens = not self._listens
            (self._clients.listen if self._listens else self._clients.unlisten)(self.look)

    def release(self, turn: ItemTurn) -> None:
        """Frees the slots of an item that has ended, or takes it out of the queue."""
        if turn in self._running:
            self._running.remove(turn)
        elif turn in self._waiting:
            self._waiting.remove(turn)
        if not self._waiting:
            self._stop_timer()
        self.look()

    def _let_in(self) -> None:
        turn = self._waiting.popleft()
        self._running.add(turn)
        turn.admitted.set_result(None)
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _lose_patience(self) -> None:
        self._timer = None
        if self._waiting and not self._running:
            self._waiting[0].overdue = True
            self._let_in()
        self.look()

    def _may_start(self, sequences: int) -> bool:
        if self._clients.waiting_prompts or any(not turn.began for turn in self._running):
            return False
        taken = sum(turn.sequences for turn in self._running)
        if self._clients.active and taken and taken + sequences > self._slots * _SHARE:
            return False
        busy = taken + self._clients.sequences(self._model)
        return busy == 0 or busy + sequences < self._slots


class ItemTurn(RequestObservers, RequestObserver):
    """The turn of one item. It observes the item's request, to learn when its prompt is prefilled."""

    def __init__(self, slots: ItemSlots, sequences: int) -> None:
        self._slots = slots
        self.sequences = sequences
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.began = False
        self.overdue = False  # True: the item waits in the engine's queue with a client's priority

    def close(self) -> None:
        """Frees the item's slots. Idempotent."""
        self.admitted.cancel()
        self._slots.release(self)

    def started(self, request: GenerationRequest) -> ItemTurn:
        return self

    def event(self, event: TokenEvent) -> None:
        if not self.began:
            self.began = True
            self._slots.look()

    def failed(self, error: BaseException) -> None:
        self.close()

    def closed(self) -> None:
        self.close()
