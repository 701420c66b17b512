"""While a thread hangs in a step, deadlines, aborts and shutdown are handled without it, and each exactly once."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest, Mailbox
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.request_state import RequestState
from mlserver_torch_stream.engine.scheduler.queue import QueueLimits
from mlserver_torch_stream.engine.step.batcher import Batcher
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.engine.watchdog import (
    PATIENCE,
    EndRequest,
    FairLock,
    PendingDeath,
    StepProgress,
    StepTimeout,
    WatchdogState,
    Work,
    trouble,
)
from mlserver_torch_stream.errors import GenerationFailed, NotServing, TimedOut
from mlserver_torch_stream.types import FinishReason, ModelInfo, TokenEvent
from tests.engine.test_engine_time import batcher_of, engine_of
from tests.engine.tiny import (
    CONTEXT,
    VOCAB,
    Watch,
    byte_tokenizer,
    decodes,
    greedy,
    idle,
    prompt_of,
    reference,
    run,
    tiny_model,
    tokens_of,
    until,
)

_HANGS_S = 30.0
BOUNDS = QueueLimits(step_timeout=60.0, chunk=512)


@pytest.fixture
def waiting(codec: TextCodec, loop: asyncio.AbstractEventLoop) -> RequestState:
    given = EngineRequest(prompt_of(3), greedy(5))
    made = RequestState(given, Mailbox(loop, 1, lambda mailbox: None), codec, (), CONTEXT)
    made.submitted_at = 0.0
    return made


class TestWhatIsDecided:
    """Decides from recorded facts and ``now`` alone, without a clock and without a thread."""

    def test_a_deadline_is_asked_of_the_thread_first_and_kept_without_it_soon_after(
        self, waiting: RequestState
    ) -> None:
        state = WatchdogState(BOUNDS)
        waiting.timeout_s = 5.0
        state.watch([waiting])
        assert state.decide(4.9, []).ask == []
        assert state.decide(4.9, []).seconds == pytest.approx(0.1)
        decision = state.decide(5.0, [])
        (end,) = decision.ask
        assert end.requests == (waiting,) and end.reason is FinishReason.TIMEOUT and isinstance(end.error, TimedOut)
        assert decision.unanswered == [] and decision.seconds == pytest.approx(PATIENCE)
        assert state.decide(5.0 + PATIENCE, []).unanswered == [end]
        assert state.decide(6.0, []).unanswered == [], "once"

    def test_a_job_that_has_begun_has_no_deadline_for_its_wait(self, waiting: RequestState) -> None:
        state = WatchdogState(QueueLimits(queue_timeout=1.0))
        state.watch([waiting])
        waiting.started_at = 0.5
        assert state.decide(2.0, []).ask == []

    def test_what_the_thread_was_asked_is_done_without_it_when_its_time_is_over(self, waiting: RequestState) -> None:
        state = WatchdogState(BOUNDS)
        end = EndRequest((waiting,), FinishReason.ABORT, NotServing("the end"), 10.0)
        state.expect(end)
        assert state.decide(10.0 + PATIENCE / 2, []).unanswered == []
        assert state.decide(10.0 + PATIENCE, []).unanswered == [end]

    def test_a_step_is_overdue_at_half_its_time_and_lost_at_all_of_it(self) -> None:
        state, work = WatchdogState(BOUNDS), Work("the decode step of 3 sequences", 1, since=100.0)
        assert state.decide(129.9, [work]).overdue == []
        assert state.decide(130.0, [work]).overdue == [work]
        later = state.decide(131.0, [work])
        assert later.overdue == [] and later.lost is None, "it is said once"
        assert later.seconds <= 29.0
        lost = state.decide(160.0, [work]).lost
        assert isinstance(lost, StepTimeout)
        assert str(lost) == "the decode step of 3 sequences has not returned for 60 s (step_timeout)"

    def test_work_that_was_logged_is_not_kept(self) -> None:
        """The work refers to the sequences of its step, so keeping it would keep them, too."""

        class Step:
            pass

        state, step = WatchdogState(BOUNDS), Step()
        freed = weakref.ref(step)
        overdue = len(state.decide(130.0, [Work(step, 1, since=100.0)]).overdue)
        del step
        assert overdue == 1 and freed() is None

    def test_work_that_begins_later_is_looked_at_before_it_can_be_overdue(self) -> None:
        assert WatchdogState(BOUNDS).decide(0.0, []).seconds <= 30.0

    def test_a_prompt_that_is_not_cut_may_take_as_long_as_its_chunks(self) -> None:
        state, whole = WatchdogState(BOUNDS), Work("the prefill of 5000 tokens", 5000, since=0.0)
        assert state.decide(599.0, [whole]).lost is None
        assert state.decide(600.0, [whole]).lost is not None

    def test_each_of_several_works_is_looked_at(self) -> None:
        """One flight of the pipeline hangs while others complete."""
        stuck, fresh = (
            Work("the decode step of 1 sequence", 1, since=0.0),
            Work("the decode step of 2 sequences", 1, since=59.0),
        )
        assert "1 sequence" in str(WatchdogState(BOUNDS).decide(60.0, [fresh, stuck]).lost)

    def test_without_a_bound_nothing_is_ever_overdue(self) -> None:
        decision = WatchdogState(QueueLimits()).decide(1e9, [Work("a step", 1, since=0.0)])
        assert decision.lost is None and decision.overdue == [] and decision.seconds <= 3600

    def test_a_step_within_which_no_request_can_be_in_time_is_overdue(self) -> None:
        queue_limits = QueueLimits(step_timeout=1800.0, request_timeout=5.0)
        work = Work("the decode step of 3 sequences", 1, since=0.0)
        assert trouble([work], queue_limits, 4.9) is None
        assert trouble([work], queue_limits, 5.1) == "the decode step of 3 sequences has not returned for 5 s"

    def test_a_thread_that_is_to_die_is_waited_for_only_so_long(self) -> None:
        pending_death = PendingDeath(RuntimeError("a rank is lost"), until=5.0)
        assert WatchdogState(BOUNDS).decide(4.0, [], pending_death).lost is None
        assert WatchdogState(BOUNDS).decide(4.0, [], pending_death).seconds <= 1.0
        assert WatchdogState(BOUNDS).decide(5.0, [], pending_death).lost is pending_death.error
        assert (
            WatchdogState(BOUNDS).decide(1e9, [], PendingDeath(RuntimeError("whenever"), until=math.inf)).lost is None
        )


def test_progress_says_all_that_is_under_way() -> None:
    moments = iter([1.0, 2.0, 3.0])
    progress = StepProgress(lambda: next(moments))
    progress.at("a step")
    progress.launched("a", "a forward", 7)
    progress.launched("b", "another forward")
    progress.rest()
    assert progress.works() == [Work("a forward", 7, 2.0), Work("another forward", 1, 3.0)]
    progress.completed("a")
    progress.completed("b")
    assert progress.works() == []


# --- a real engine whose forward is held ---


def hung_engine(model: PreTrainedModel, kind: str, **queue_limits: float) -> EngineCore:
    return engine_of(batcher_of(kind, model, max_num_seqs=1), QueueLimits(**queue_limits))  # type: ignore[arg-type]


async def events_of(stream: Mailbox) -> list[TokenEvent]:
    return [event async for event in stream]


def run_and_end(scenario: Coroutine[Any, Any, None], watch: Watch, *engines: EngineCore) -> None:
    """Runs the scenario; then lets the held forward continue, and shuts the engines down."""
    try:
        run(scenario)
    finally:
        watch.let_go()
        for engine in engines:
            engine.shutdown()


@pytest.mark.parametrize("kind", ["batched", "serial"])
class TestAStepThatHangs:
    @pytest.mark.long
    def test_deadlines_are_kept_and_the_rows_are_freed_when_the_thread_is_back(
        self, kind: str, model: PreTrainedModel, watch: Watch
    ) -> None:
        """The stream in the step, with its tokens so far, and the one that waits each end once, in time."""
        engine = hung_engine(model, kind, request_timeout=4.0)

        async def scenario() -> None:
            watch.stop_at(decodes(engine, 1))
            running = engine.submit([EngineRequest(prompt_of(5), greedy(200))])
            first = await anext(running)
            await watch.stopped()
            waiting = engine.submit([EngineRequest(prompt_of(6), greedy(200))])
            ends = await asyncio.wait_for(asyncio.gather(events_of(running), events_of(waiting)), 15)
            assert engine._thread.is_alive() and not idle(engine), "it is still held"
            for events in ends:
                assert [event.finish_reason for event in events][-1:] == [FinishReason.TIMEOUT]
                assert sum(event.finish_reason is not None for event in events) == 1
                assert isinstance(events[-1].error, TimedOut)
            tokens = [token for event in (first, *ends[0]) for token in event.token_ids]
            assert tokens == expected[: len(tokens)] and tokens
            usage = ends[0][-1].usage
            assert usage is not None and (usage.num_input_tokens, usage.num_output_tokens) == (5, len(tokens))
            assert [event.token_ids for event in ends[1]] == [()]
            watch.let_go()
            await until(lambda: idle(engine), "free rows")
            assert await events_of(running) == await events_of(waiting) == [], "nothing is delivered twice"
            assert engine.stats().timed_out_sequences == 2
            assert await tokens_of(engine, prompt_of(5), greedy(9)) == expected[:9]

        expected = reference(model, prompt_of(5), 200)
        run_and_end(scenario(), watch, engine)

    def test_an_abort_ends_every_stream(self, kind: str, model: PreTrainedModel, watch: Watch) -> None:
        engine = hung_engine(model, kind)

        async def scenario() -> None:
            watch.stop_at(decodes(engine, 1))
            running = engine.submit([EngineRequest(prompt_of(5), greedy(200))])
            await anext(running)
            await watch.stopped()
            waiting = engine.submit([EngineRequest(prompt_of(6), greedy(200, n=1))])
            engine.drain("the model is unloaded")
            engine.abort_all("the model is unloaded")
            for stream in (running, waiting):
                events = await asyncio.wait_for(events_of(stream), 15)
                assert [event.finish_reason for event in events][-1:] == [FinishReason.ABORT]
                assert isinstance(events[-1].error, NotServing)
            watch.let_go()
            await until(lambda: idle(engine), "free rows")

        run_and_end(scenario(), watch, engine)

    @pytest.mark.long
    def test_it_is_not_ready_then_given_up_with_the_step_named(
        self, kind: str, model: PreTrainedModel, watch: Watch
    ) -> None:
        deaths: list[BaseException] = []
        engine = engine_of(batcher_of(kind, model), QueueLimits(step_timeout=2.0), on_death=deaths.append)

        async def scenario() -> None:
            watch.stop_at(decodes(engine, 1))
            running = engine.submit([EngineRequest(prompt_of(5), greedy(200))])
            await anext(running)
            await watch.stopped()
            assert engine.trouble is None
            await until(lambda: engine.trouble is not None, "trouble")
            assert engine.alive and "has not returned for" in str(engine.trouble)
            events = await asyncio.wait_for(events_of(running), 20)
            assert isinstance(events[-1].error, GenerationFailed)
            assert "has not returned for 2 s (step_timeout)" in str(events[-1].error)
            await until(lambda: len(deaths) == 1, "word of its death")
            assert isinstance(deaths[0], StepTimeout) and engine.trouble == "its engine died"
            with pytest.raises(NotServing, match="step_timeout"):
                engine.submit([EngineRequest(prompt_of(3))])
            watch.let_go()
            engine._thread.join(_HANGS_S)
            assert not engine._thread.is_alive() and await events_of(running) == []

        run_and_end(scenario(), watch, engine)


@pytest.mark.long
def test_a_stop_string_that_is_held_back_stays_so_when_the_thread_hangs(model: PreTrainedModel, watch: Watch) -> None:
    """Only the thread knows which text may begin a stop string. The tokens that are billed are those delivered."""
    engine = hung_engine(model, "batched", request_timeout=4.0)
    sequence = reference(model, prompt_of(5), 200)
    text = byte_tokenizer().decode(sequence[:4])

    async def scenario() -> None:
        watch.stop_at(lambda ids: engine.stats().generation_tokens == 3)
        stream = engine.submit([EngineRequest(prompt_of(5), greedy(200, stop=(f"{text}no such end",)))])
        await watch.stopped()
        events = await asyncio.wait_for(events_of(stream), 15)
        assert events[-1].finish_reason is FinishReason.TIMEOUT
        usage = events[-1].usage
        assert usage is not None
        assert usage.num_output_tokens == sum(len(event.token_ids) for event in events)

    run_and_end(scenario(), watch, engine)


@pytest.mark.long
def test_the_wait_of_a_prompt_in_pieces_whose_end_comes_while_the_thread_hangs_is_bounded(
    model: PreTrainedModel, watch: Watch
) -> None:
    engine = hung_engine(model, "batched", queue_timeout=1.0)

    async def scenario() -> None:
        watch.stop_at(decodes(engine, 1))
        running = engine.submit([EngineRequest(prompt_of(5), greedy(200))])
        await watch.stopped()
        pieces = engine.submit([EngineRequest((), greedy(9), open=True)])
        pieces.extend(prompt_of(4))
        watch.let_go()
        await watch.hold()  # the pieces are taken in before the next forward
        assert engine.stats().open_prompts == 1
        pieces.seal(prompt_of(6))
        (event,) = await asyncio.wait_for(events_of(pieces), 15)
        assert event.finish_reason is FinishReason.TIMEOUT and "exceeded its timeout in the queue" in str(event.error)
        running.close()
        watch.let_go()
        await until(lambda: idle(engine), "free rows")
        assert engine.stats().timed_out_sequences == 1

    run_and_end(scenario(), watch, engine)


def test_a_stream_that_is_closed_before_the_thread_takes_it_in_has_ended(model: PreTrainedModel, watch: Watch) -> None:
    """It is counted as ended, and its pending deadline does not keep its prompt in memory."""
    engine = hung_engine(model, "batched", request_timeout=600.0)

    async def scenario() -> None:
        watch.stop_at(decodes(engine, 1))
        running = engine.submit([EngineRequest(prompt_of(5), greedy(200))])
        await anext(running)
        await watch.stopped()
        left = engine.submit([EngineRequest(prompt_of(4), greedy(9, n=1))])
        (request,) = engine._open[left]
        left.close()
        running.close()
        watch.let_go()
        await until(lambda: idle(engine) and not engine._open, "free rows")
        assert request.finished and engine.stats().cancelled_sequences == 2

    run_and_end(scenario(), watch, engine)


@pytest.mark.long
def test_an_engine_that_waits_for_the_cores_of_one_that_hangs_keeps_its_deadlines(
    model: PreTrainedModel, watch: Watch
) -> None:
    fair_lock, other = FairLock(), tiny_model("llama", seed=1)
    hung = engine_of(batcher_of("batched", model), fair_lock=fair_lock)
    waiting = engine_of(batcher_of("batched", other), QueueLimits(request_timeout=1.0), fair_lock=fair_lock)

    async def scenario() -> None:
        watch.stop_at()
        stream = hung.submit([EngineRequest(prompt_of(5), greedy(200))])
        await watch.stopped()
        event = (await asyncio.wait_for(events_of(waiting.submit([EngineRequest(prompt_of(4), greedy(9))])), 15))[-1]
        assert event.finish_reason is FinishReason.TIMEOUT
        assert "it waits for its device: the " in str(waiting.trouble), "no request of its own can be in time"
        stream.close()
        watch.let_go()
        await until(lambda: waiting.trouble is None, "the end of it")

    run_and_end(scenario(), watch, hung, waiting)


def test_a_thread_that_comes_back_with_nothing_to_do_ends_too(model: PreTrainedModel) -> None:
    """Otherwise it would wait for work that can no longer be posted."""
    batcher, gate = batcher_of("batched", model), threading.Event()
    batcher.step = lambda *callbacks: not gate.wait(60)  # type: ignore[method-assign]
    engine = engine_of(batcher, QueueLimits(step_timeout=1.0))

    async def scenario() -> None:
        events = await asyncio.wait_for(events_of(engine.submit([EngineRequest(prompt_of(3), greedy(3))])), 20)
        assert events[-1].finish_reason is FinishReason.ERROR
        gate.set()
        engine._thread.join(_HANGS_S)
        assert not engine._thread.is_alive()

    try:
        run(scenario())
    finally:
        gate.set()


def test_no_thread_of_an_engine_is_left(model: PreTrainedModel) -> None:
    info = ModelInfo(vocab_size=VOCAB, max_model_len=CONTEXT, max_num_seqs=2)
    batcher: Batcher = batcher_of("batched", model)
    engine = EngineCore(batcher, TextCodec(byte_tokenizer()), info, (), name="left")
    engine.shutdown()
    end = time.monotonic() + _HANGS_S
    while [thread for thread in threading.enumerate() if thread.name.endswith("-left")]:
        assert time.monotonic() < end
        time.sleep(0.01)
