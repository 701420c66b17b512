"""When a row of a batch may start: beside how many requests of clients, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from mlserver_torch_stream.server.item_slots import ItemSlots, ItemTurn
from mlserver_torch_stream.server.observability.request_observer import ClientLoad
from mlserver_torch_stream.types import TokenEvent

_FIRST = TokenEvent(0, "a", (1,))


def on_a_loop(check: Callable[[], None]) -> Callable[[], None]:
    """Runs a test on an event loop, which is required by the future of a turn."""

    def test() -> None:
        async def run() -> None:
            check()

        asyncio.run(run())

    test.__name__ = check.__name__
    return test


def _begun(slots: ItemSlots, sequences: int = 1) -> ItemTurn:
    turn = slots.ask(sequences)
    assert turn.admitted.done()
    turn.event(_FIRST)
    return turn


@on_a_loop
def test_one_slot_stays_free() -> None:
    slots = ItemSlots("m", 4, ClientLoad())
    running = [_begun(slots) for _ in range(3)]
    waiting = slots.ask(1)
    assert not waiting.admitted.done()
    running[1].close()
    assert waiting.admitted.done()


@on_a_loop
def test_rows_are_prefilled_one_at_a_time_in_the_order_in_which_they_asked() -> None:
    slots = ItemSlots("m", 8, ClientLoad())
    first, second, third = (slots.ask(1) for _ in range(3))
    assert [turn.admitted.done() for turn in (first, second, third)] == [True, False, False]
    first.event(_FIRST)
    assert [turn.admitted.done() for turn in (second, third)] == [True, False]
    second.close()  # it failed before its first token
    assert third.admitted.done()


@on_a_loop
def test_no_row_starts_while_a_prompt_of_a_client_waits_for_its_first_token() -> None:
    clients = ClientLoad()
    slots = ItemSlots("m", 8, clients)
    clients.prompted("another model", 1)
    turn = slots.ask(1)
    assert not turn.admitted.done()
    clients.first_token()
    assert turn.admitted.done()


@on_a_loop
def test_the_sequences_of_clients_take_slots_until_they_end() -> None:
    clients = ClientLoad()
    slots = ItemSlots("m", 4, clients)
    clients.prompted("m", 3)
    clients.first_token()
    turn = slots.ask(1)
    assert not turn.admitted.done()
    clients.ended("m", 3, answered=True)
    assert turn.admitted.done()


def test_rows_take_an_eighth_of_the_slots_until_clients_have_been_quiet_for_a_while() -> None:
    async def run() -> None:
        loop, now = asyncio.get_running_loop(), 0.0
        loop.time = lambda: now  # type: ignore[method-assign]
        clients = ClientLoad(quiet_s=0.05)
        slots = ItemSlots("m", 16, clients)
        for _ in range(2):  # the second request comes before the first one's time is over
            clients.prompted("m", 1)
            clients.first_token()
            clients.ended("m", 1, answered=True)
            now += 0.03
            await asyncio.sleep(0)
        rows = [_begun(slots) for _ in range(2)]
        waiting = slots.ask(1)
        assert clients.active and not waiting.admitted.done()
        rows.pop().close()
        assert waiting.admitted.done()
        waiting.event(_FIRST)
        late = slots.ask(1)
        assert not late.admitted.done()
        now += 0.03
        await asyncio.wait_for(late.admitted, 10)
        assert not clients.active

    asyncio.run(run())


@on_a_loop
def test_a_request_that_fails_before_its_first_token_holds_no_row_up() -> None:
    clients = ClientLoad()
    slots = ItemSlots("m", 4, clients)
    clients.prompted("m", 1)
    turn = slots.ask(1)
    clients.ended("m", 1, answered=False)
    assert turn.admitted.done() and clients.waiting_prompts == 0 and clients.sequences("m") == 0


@on_a_loop
def test_a_model_with_one_slot_answers_rows_while_it_has_nothing_else_to_do() -> None:
    slots = ItemSlots("m", 1, ClientLoad())
    first = _begun(slots)
    second = slots.ask(1)
    assert not second.admitted.done()
    first.close()
    assert second.admitted.done()


@on_a_loop
def test_a_row_of_many_sequences_takes_as_many_slots() -> None:
    slots = ItemSlots("m", 4, ClientLoad())
    wide = _begun(slots, 3)
    assert not slots.ask(1).admitted.done()
    wide.close()


@on_a_loop
def test_a_row_that_leaves_before_its_turn_lets_the_next_one_in() -> None:
    slots = ItemSlots("m", 2, ClientLoad())
    first, second, third = _begun(slots), slots.ask(1), slots.ask(1)
    second.close()
    second.close()
    first.close()
    assert third.admitted.done() and second.admitted.cancelled()


def test_a_turn_that_is_cancelled_while_it_waits_raises_in_its_waiter() -> None:
    async def run() -> None:
        slots = ItemSlots("m", 2, ClientLoad())
        _begun(slots)
        waiting = slots.ask(1)
        task = asyncio.ensure_future(waiting.admitted)
        waiting.close()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_under_a_load_that_never_ends_a_row_is_let_in_after_a_while_and_the_next_one_after_its_end() -> None:
    async def run() -> None:
        clients = ClientLoad()
        slots = ItemSlots("m", 4, clients, patience_s=0.02)
        for _ in range(4):
            clients.prompted("m", 1)  # they hold all slots, and a prompt always waits
        first, second = slots.ask(1), slots.ask(1)
        assert not first.admitted.done()
        await asyncio.wait_for(first.admitted, 10)
        first.event(_FIRST)
        await asyncio.sleep(0.1)
        assert first.overdue and not second.admitted.done()
        first.close()
        await asyncio.wait_for(second.admitted, 10)
        assert second.overdue

    asyncio.run(run())


def test_a_row_that_waits_for_other_rows_is_never_overdue() -> None:
    async def run() -> None:
        slots = ItemSlots("m", 2, ClientLoad(), patience_s=0.01)
        first, second = _begun(slots), slots.ask(1)
        await asyncio.sleep(0.1)
        assert not second.admitted.done()  # one slot stays free
        first.close()
        assert second.admitted.done() and not second.overdue

    asyncio.run(run())
