"""Batches in flight over one cache of pages: each reads what the batch before it writes, and not too early."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.pipeline.in_flight import BatchAheadFailed, InFlightForwards
from mlserver_torch_stream.engine.pipeline.stages import Pipeline, StagedForward, read_stages
from tests.engine.emulated import laid_out
from tests.engine.tiny import prompt_of, tiny_model

PAGE = 4
PROMPT = prompt_of(14)
OTHER = (*PROMPT[:12], 3, 1, 4)  # two pages and a half are the same


class Flight:
    """Runs forwards of a model on three emulated devices, over one cache."""

    def __init__(self, model: PreTrainedModel, way: Way = Way.PACKED) -> None:
        self.model = laid_out(model, 3)
        layout = CacheLayout(model.config)
        self.groups = len(layout.spec(PAGE).groups)
        self.cache = PagedCache(layout, PAGE, [32] * self.groups, 4)
        self.forward = StagedForward(ModelForward(self.model, way), Pipeline(read_stages(self.model)))
        self.in_flight: InFlightForwards[str, torch.Tensor] = InFlightForwards(3, 1, PAGE)
        self.landed: dict[str, Future[torch.Tensor]] = {}

    def part(self, ids: Sequence[int], start: int, *table: int, slot: int = -1) -> BatchSequence:
        return BatchSequence(ids[start:], start, (table,) * self.groups, state_slot=slot)

    def launch(self, key: str, *parts: BatchSequence, late: float = 0, **copies: Any) -> None:
        """``late`` is the number of seconds before the batch's thread reaches the first device."""
        batch = Batch(parts, **copies)

        def work() -> torch.Tensor:
            time.sleep(late)
            return self.forward(batch, self.cache).tensor

        self.in_flight.launch(key, work, batch)

    def land(self, key: str) -> torch.Tensor:
        while key not in self.landed:
            self.landed.update(self.in_flight.completed())
        return self.landed[key].result()

    @contextmanager
    def slow(self, seconds: float = 0.3) -> Iterator[threading.Event]:
        """Holds the first forward that reaches the second device, until the event is set or the time is over."""
        gate, reached = threading.Event(), threading.Event()

        def hold(*_: Any) -> None:
            if not reached.is_set():
                reached.set()
                gate.wait(seconds)

        hook = self.model.model.layers[1].register_forward_pre_hook(hold)
        try:
            yield gate
        finally:
            gate.set()
            hook.remove()


@pytest.fixture
def take_off() -> Iterator[Callable[..., Flight]]:
    flights: list[Flight] = []

    def take_off(family: str = "llama", **options: Any) -> Flight:
        flights.append(Flight(tiny_model(family), **options))
        return flights[-1]

    with torch.inference_mode():
        yield take_off
    for flight in flights:
        flight.in_flight.close()


def last_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0, -1:]
    return logits


close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("way", [Way.PACKED, Way.MASKED_ROWS])
def test_a_batch_reads_pages_that_the_batch_ahead_of_it_still_writes(take_off: Callable[..., Flight], way: Way) -> None:
    flight = take_off(way=way)
    flight.launch("first", flight.part(PROMPT, 0, 0, 1, 2, 3), late=0.3)
    flight.launch("second", flight.part(OTHER, 8, 0, 1, 4, 5))
    close(flight.land("second"), last_logits(flight.model, OTHER))
    close(flight.land("first"), last_logits(flight.model, PROMPT))


def test_a_page_is_copied_after_the_batch_ahead_has_written_it_on_every_device(
    take_off: Callable[..., Flight],
) -> None:
    """So does a request with n > 1 when its answers diverge: the third page is copied in the middle."""
    flight = take_off()
    with flight.slow():
        flight.launch("first", flight.part(PROMPT[:10], 0, 0, 1, 2))
        flight.launch("second", flight.part((*PROMPT[:10], 77), 10, 0, 1, 5), copies=((0, 2, 5),))
        close(flight.land("second"), last_logits(flight.model, (*PROMPT[:10], 77)))


def test_answers_that_share_a_page_part_in_unlike_batches(take_off: Callable[..., Flight]) -> None:
    """One answer copies the page while the last one that holds it writes to it."""
    flight = take_off()
    flight.launch("prompt", flight.part(PROMPT, 0, 0, 1, 2, 3))
    flight.land("prompt")
    with flight.slow():
        flight.launch("first", flight.part((*PROMPT, 77), 14, 0, 1, 2, 5), copies=((0, 3, 5),))
        flight.launch("second", flight.part((*PROMPT, 88), 14, 0, 1, 2, 3))
        close(flight.land("second"), last_logits(flight.model, (*PROMPT, 88)))
        close(flight.land("first"), last_logits(flight.model, (*PROMPT, 77)))


def test_a_page_that_is_still_to_be_copied_is_not_written_by_the_next_one_to_get_it(
    take_off: Callable[..., Flight],
) -> None:
    """This happens, for example, if the last sequence that held the page was closed in the meantime."""
    flight = take_off()
    flight.launch("prompt", flight.part(PROMPT, 0, 0, 1, 2, 3))
    flight.land("prompt")
    answer = (*PROMPT, 77)
    flight.launch("first", flight.part(answer, 14, 0, 1, 2, 5), copies=((0, 3, 5),), late=0.3)
    flight.launch("second", flight.part(OTHER[8:], 0, 3, 6))
    close(flight.land("second"), last_logits(flight.model, OTHER[8:]))
    close(flight.land("first"), last_logits(flight.model, answer))


def test_states_are_copied_after_the_batch_ahead_has_put_them(take_off: Callable[..., Flight]) -> None:
    flight = take_off("lfm2", way=Way.ROWS)
    with flight.slow():
        flight.launch("first", flight.part(PROMPT, 0, 0, 1, 2, 3, slot=0))
        answer = (*PROMPT, 77)
        flight.launch(
            "second",
            flight.part(answer, 14, 0, 1, 2, 5, slot=2),
            copies=((0, 3, 5),),
            state_copies=((0, 2),),
        )
        close(flight.land("second"), last_logits(flight.model, answer))


def test_batches_that_share_nothing_do_not_wait_for_each_other(take_off: Callable[..., Flight]) -> None:
    """The first batch occupies the second device; another batch waits there, and one that needs no stage completes."""
    flight = take_off()
    with flight.slow(60) as gate:
        flight.launch("first", flight.part(PROMPT, 0, 0, 1, 2, 3))
        nothing = Batch((flight.part(OTHER, 0, 8, 9, 10, 11),))
        flight.in_flight.launch("second", lambda: torch.zeros(1), nothing)
        assert flight.land("second").tolist() == [0]
        assert len(flight.in_flight) == 1
        gate.set()
        close(flight.land("first"), last_logits(flight.model, PROMPT))


def test_a_batch_whose_pages_nobody_has_written_does_not_run(take_off: Callable[..., Flight]) -> None:
    flight = take_off()
    gate = threading.Event()

    def fail(*_: Any) -> None:
        assert gate.wait(60)
        raise RuntimeError("no memory, say")

    hook = flight.model.model.layers[1].register_forward_pre_hook(fail)
    flight.launch("first", flight.part(PROMPT, 0, 0, 1, 2, 3))
    flight.launch("second", flight.part(OTHER, 8, 0, 1, 4, 5))
    flight.launch("third", flight.part((*OTHER, 7), 15, 0, 1, 4, 5))
    gate.set()
    with pytest.raises(BatchAheadFailed, match="a batch ahead failed: no memory, say"):
        flight.land("second")
    with pytest.raises(BatchAheadFailed):
        flight.land("third")
    with pytest.raises(RuntimeError, match="no memory"):
        flight.land("first")
    hook.remove()
    flight.launch("again", flight.part(PROMPT, 0, 0, 1, 2, 3))
    flight.launch("after it", flight.part(OTHER, 8, 0, 1, 4, 5))
    close(flight.land("after it"), last_logits(flight.model, OTHER))


@pytest.mark.parametrize("way", [Way.PACKED, Way.MASKED_ROWS])
def test_a_part_of_a_batch_reads_pages_that_one_before_it_writes(take_off: Callable[..., Flight], way: Way) -> None:
    """That includes a part with a single token, which must not be moved to the front with other single tokens."""
    flight = take_off(way=way)
    flight.launch("before", flight.part(PROMPT[:6], 0, 8, 9))
    flight.land("before")
    answer, same = (*PROMPT[:6], 77), (*PROMPT[:12], 88)
    parts = flight.part(answer, 6, 8, 9), flight.part(PROMPT, 0, 0, 1, 2, 3), flight.part(same, 12, 0, 1, 2, 4)
    flight.launch("all", *parts)
    expected = [last_logits(flight.model, each) for each in (answer, PROMPT, same)]
    close(flight.land("all"), torch.cat(expected))
