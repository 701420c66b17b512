"""Batches continuously: each step computes the decode tokens and prompt chunks of all sequences in one forward pass.

The scheduler decides what a step computes; this module runs it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

from mlserver_torch_stream.engine.api import EngineRequest, EngineStats
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch, CacheSpec
from mlserver_torch_stream.engine.constraints.token_matcher import TokenMatcher
from mlserver_torch_stream.engine.failures import drop_tracebacks, in_short
from mlserver_torch_stream.engine.fault_injection import FaultyForward, InjectedFault
from mlserver_torch_stream.engine.forward.interface import Forward, Logits
from mlserver_torch_stream.engine.pipeline.in_flight import BatchAheadFailed, InFlightForwards
from mlserver_torch_stream.engine.pipeline.stages import Pipeline, StagedForward
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.sampling.sampler import SamplerFactory
from mlserver_torch_stream.engine.scheduler.ledger import StepPart
from mlserver_torch_stream.engine.scheduler.queue import PromptBudget, SchedulerLimits
from mlserver_torch_stream.engine.scheduler.scheduler import Scheduler, StepPlan
from mlserver_torch_stream.engine.step.batcher import PROMPT_LOGPROBS, Batcher, Deliver, Poll, YieldDevice
from mlserver_torch_stream.engine.step.choose import StepResult, TokenChoice, in_halves, no_result, whole_result
from mlserver_torch_stream.engine.step.drafts import Drafter, PromptLookup
from mlserver_torch_stream.engine.step.step_cost import StepCost
from mlserver_torch_stream.errors import GenerationFailed, InvalidInput
from mlserver_torch_stream.types import FinishReason

logger = logging.getLogger(__name__)

_SILENT_STEPS = 3  # steps in a row without prompts while a stream awaits text: a character has at most four tokens

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class InlineForwards(Generic[K, T]):
    """Runs forwards on the engine's thread.

    With ``overlap``, ``launch`` calls the forward, which returns before the device is done, as on a GPU. Without
    ``overlap``, ``completed`` calls the forward, which returns when the logits are computed. ``called_at_launch`` is
    true if ``launch`` calls the forward.
    """

    most = 1

    def __init__(self, *, overlap: bool = False) -> None:
        self.overlap = self.called_at_launch = overlap
        self._launched: list[tuple[K, _Call[T]]] = []

    def __len__(self) -> int:
        return len(self._launched)

    def launch(self, key: K, work: Callable[[], T], batch: Batch) -> None:
        call = _Call(work)
        self._launched.append((key, call))
        if self.called_at_launch:
            call.run()

    def completed(self) -> list[tuple[K, _Call[T]]]:
        launched, self._launched = self._launched, []
        for _, call in launched if not self.called_at_launch else ():
            call.run()
        return launched

    def close(self) -> None:
        """Does nothing, because no forward runs in the background."""


class _Call(Generic[T]):
    """A call whose result is read later, as with a ``Future``."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


Flights = InlineForwards[Any, Logits] | InFlightForwards[Any, Logits]


@dataclass(frozen=True, eq=False, slots=True)
class _StepInFlight:
    """A step whose forward has not returned. ``began`` is the time at which the step was scheduled.

    ``requests`` are the requests of its ``sequences``.
    """

    plan: StepPlan
    began: float
    requests: dict[RequestState, None]
    sequences: set[SequenceState]


class ContinuousBatcher(Batcher):
    """Schedules a step, runs its forward, samples its rows, delivers the tokens, and releases ended sequences.

    With a ``pipeline`` there is one step in flight per stage. No two steps in flight have a sequence in common, and a
    call of ``step`` waits for one of them. ``flights`` runs the forwards; None means ``InFlightForwards`` with a
    pipeline, ``InlineForwards`` without. If forwards overlap with the engine's thread, the next step is launched before
    the text of the previous step is made. If that text ends a sequence, the sequence's token from the next step is
    dropped. With ``drafts_forced``, several tokens that a constraint forces are computed in one step. ``step_target``
    is the desired duration, in seconds, of a step in which sequences decode. Within the limits, the step takes as many
    prompt tokens as fit into this time, but at least a page. If ``step_target`` is None, only the limits bound a step.
    ``check_devices`` raises an error if a device is lost. This error ends the engine's thread, because no request has
    caused it.
    """

    def __init__(
        self,
        forward: Forward,
        cache: PagedCache,
        samplers: SamplerFactory,
        limits: SchedulerLimits,
        spec: CacheSpec,
        *,
        lookup: PromptLookup | None = None,
        drafts_forced: bool = True,
        step_target: float | None = None,
        pipeline: Pipeline | None = None,
        flights: Flights | None = None,
        faults: Sequence[InjectedFault] = (),
        check_devices: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(EngineStats(kv_cache_budget=limits.cache_bytes))
        if pipeline is not None:
            forward = StagedForward(forward, pipeline)
        self._forward: Forward = FaultyForward(faults, forward) if faults else forward
        self._cache = cache
        self._drafter = Drafter(lookup, drafts_forced)
        self._cost = StepCost() if lookup is None else lookup.cost
        self._step_target = step_target
        self._min_prompt_tokens = spec.page_size
        self._scheduler = Scheduler(limits, spec, self._drafter.drafts)
        self._choice = TokenChoice(samplers, check_devices)
        self._mask_worker = ThreadPoolExecutor(1, "token-masks")  # its thread ends when this object is deleted
        self._check_devices = check_devices
        self._aside = nullcontext if pipeline is None else pipeline.aside
        if flights is None and pipeline is not None:
            flights = InFlightForwards(pipeline.depth, pipeline.threads, cache.page_size)
        self._flights: Flights = InlineForwards() if flights is None else flights
        self._busy: set[SequenceState] = set()  # sequences of steps in flight
        self._alone_since = 0.0  # when another engine last released the device
        self._others = 0  # other engines that use the device in turn with this one
        self._kept_out = 0  # steps in a row that computed no prompt because of incomplete characters

    # --- requests ---

    def refusal(self, sequences: int, prompt: int, final_length: int) -> str | None:
        return self._scheduler.refusal(sequences, prompt, final_length)

    def check(self, request: EngineRequest) -> None:
        if request.sampling.prompt_logprobs is not None and self._scheduler.limits.whole_prompts:
            raise InvalidInput(PROMPT_LOGPROBS, "is not implemented for this model, which computes prompts whole")

    def add(self, request: RequestState) -> None:
        self._scheduler.add(request)
        self._gauge()

    def evict(self, requests: Sequence[RequestState]) -> None:
        """Removes the requests. Sequences that a running forward computes are removed when it has returned."""
        self._release(sequence for request in requests for sequence in request.sequences)
        self._gauge()

    def takes_turns_with(self, engines: int) -> None:
        self._others = engines
        if engines:
            self._alone_since = time.monotonic()

    def close(self) -> None:
        self._flights.close()

    # --- a step ---

    def step(self, deliver: Deliver, poll: Poll, yield_device: YieldDevice) -> bool:
        self._launch()
        if not len(self._flights):
            self._gauge()
            return False
        if self._flights.most > 1:
            self.progress.rest()  # the thread only waits for a forward
        completed = [(step, self._complete(step, forward.result)) for step, forward in self._flights.completed()]
        if self._flights.overlap:
            poll()  # so that the next step includes new requests, and none whose stream was closed
            self._launch()
        for step, tokens_before in completed:
            self._write(step, tokens_before, deliver)
        return True

    def _launch(self) -> None:
        """Starts forwards until as many steps are in flight as there are stages, or nothing more can be scheduled."""
        began = time.monotonic()
        self._drop_closed()
        while len(self._flights) < self._flights.most and (plan := self._schedule()):
            step = self._begin(plan, began)
            self._start_masks(plan)
            self._busy |= step.sequences
            self.progress.launched(step, plan, max(1, plan.prompt_tokens))
            if plan.prompt_tokens:
                self._gauge()  # before a long step, because an admitted request no longer waits
            self._flights.launch(step, partial(self._forward, plan.batch, self._cache), plan.batch)
            if self._flights.called_at_launch:  # other engines may use the device before a later step waits for it
                self.progress.completed(step)

    def _schedule(self) -> StepPlan:
        waits, budget = self._scheduler.has_prompts, self._prompt_budget()
        plan = self._scheduler.schedule(self._busy, budget)
        if plan:
            keeps_out = waits and budget is not None and not budget.least and not plan.prompt_tokens
            self._kept_out = self._kept_out + 1 if keeps_out else 0
        return plan

    def _prompt_budget(self) -> PromptBudget | None:
        """Returns the limit on the prompt tokens of the next step; None means no limit, as if no sequence decodes.

        If other engines use the device in turn, their streams wait for this step, too, so each engine gets a share of
        the target. If the newest tokens of a stream have no text, its reader has waited since the last event. Such
        tokens of several streams overlap, so they keep prompts out for a few steps only.
        """
        if self._step_target is None:
            return None
        now, waited, spent = time.monotonic(), 0.0, 0.0
        decoding, starts = 0, list[int]()
        for scheduled in self._scheduler.admitted:
            sequence = scheduled.sequence
            if not scheduled.decodes:
                waited = max(waited, now - sequence.waits_since)
                starts.append(scheduled.computed)
                continue
            decoding += 1
            if self._kept_out < _SILENT_STEPS and sequence.awaits_text:
                spent = max(spent, now - sequence.waits_since)
        if not (decoding or self._others):
            return None
        rows = -(-decoding // self._flights.most)  # of one of the steps in flight
        target, alone = self._step_target / (1 + self._others), decoding == 1 and not self._others
        start = starts[0] if starts else 0
        return self._cost.budget(
            target, rows, self._min_prompt_tokens, waited=waited, spent=spent, start=start, alone=alone
        )

    def _begin(self, plan: StepPlan, began: float) -> _StepInFlight:
        requests = dict.fromkeys([part.sequence.request for part in plan.parts])
        for request in requests if plan.prompt_tokens else ():
            if request.started_at is None:
                request.started_at = time.monotonic()
        sequences = {part.sequence for part in plan.parts}
        return _StepInFlight(plan, began, requests, sequences.union(*[part.samples for part in plan.parts]))

    def _start_masks(self, plan: StepPlan) -> None:
        """Starts computing the token masks of a plan's constraints, while the plan's forward runs."""
        matchers = [
            matcher
            for part in plan.parts
            for sequence in part.samples
            if (matcher := sequence.matcher) is not None and len(matcher.forced) <= len(part.drafts)
        ]
        if matchers:
            TokenMatcher.start_masks(matchers, self._mask_worker)

    def _complete(self, step: _StepInFlight, forward: Callable[[], Logits]) -> dict[SequenceState, int]:
        """Samples the tokens of a step without making their text. Releases the sequences that ended because they
        produced a stop token.

        Returns, for each sequence with new tokens, the number of tokens that it had before the step.
        """
        self.progress.completed(step)
        self.progress.at("a step")
        self._busy -= step.sequences
        result = self._result(step.plan, forward)
        with self._aside(result.logits.tensor.device):
            result.drop({part.sequence for part, row in result.rows.items() if not self._advance(part, row, result)})
            for part, scores in self._choice.score(result).items():
                self._scheduler.add_scores(part, scores)
            _end_unanswered(result)
            self._choice.choose(result)
        for part, tokens in result.verified.items():
            self._scheduler.advance(part, tokens)
        self._note_cost(step)
        self._note_drafts(result)
        self._end_spoiled(step.plan, result)
        self._count(step, result)
        self._release_ended(step)
        return result.tokens_before

    def _write(self, step: _StepInFlight, tokens_before: dict[SequenceState, int], deliver: Deliver) -> None:
        """Makes the text of a step's tokens, which may end sequences, and delivers it."""
        for sequence in tokens_before:
            sequence.write()
        self.count(generation_tokens=sum(len(each.tokens) - had for each, had in tokens_before.items()))
        sequences = self._release_ended(step)
        # Set before the events are delivered, so that their readers find correct gauges. A sequence that has ended by
        # its text still counts as running while a launched step computes it.
        self._gauge()
        deliver(sequences)

    def _release_ended(self, step: _StepInFlight) -> list[SequenceState]:
        """Releases those sequences of a step's requests that have ended. Returns all sequences of these requests."""
        sequences = [sequence for request in step.requests for sequence in request.sequences]
        if ended := [sequence for sequence in sequences if sequence.ended]:
            self._release(ended)
        return sequences

    def _end_spoiled(self, plan: StepPlan, result: StepResult) -> None:
        """Ends sequences whose logits contain NaN, unless the NaN may come from pages that another sequence wrote."""
        if not result.spoiled:
            return
        doubted = self._scheduler.restarts.doubt(plan.parts, result.spoiled)
        ended = [sequence for sequence in result.spoiled if sequence not in doubted]
        for sequence in ended:
            sequence.finish(FinishReason.ERROR, result.spoiled[sequence])
        self._release(ended, forget=True)

    def _note_cost(self, step: _StepInFlight) -> None:
        if step.began < self._alone_since:
            return  # the time includes another engine's work
        seconds = time.monotonic() - step.began
        floor = self._scheduler.limits.prefill_floor
        prompts = [part for part in step.plan.parts if part.prefills]
        rows = step.plan.batch.tokens - sum(part.count for part in prompts)
        tokens = [max(part.count, floor) for part in prompts]
        keys = sum(count * (part.start + count / 2) for part, count in zip(prompts, tokens, strict=True))
        self._cost.note(sum(tokens), rows, seconds, keys)
        if prompts and rows:
            self.count(mixed_steps=1, mixed_step_seconds=seconds)

    def _note_drafts(self, result: StepResult) -> None:
        if not result.verified:
            return
        drafted = accepted = forced = 0
        for part, tokens in result.verified.items():
            right = tokens - (part.count - len(part.drafts))
            if self._drafter.verified(part.sequence, len(part.drafts), right):
                drafted, accepted = drafted + len(part.drafts), accepted + right
            else:
                forced += right
        self.count(draft_tokens=drafted, accepted_draft_tokens=accepted, forced_tokens=forced)

    def _advance(self, part: StepPart, row: int, result: StepResult) -> bool:
        """Counts a part as computed, unless its drafts must be verified first.

        The part's logits begin at index ``row``. Returns False if the part's sequences get no token, because the part
        is void or its sequence ended while the forward ran. The pages of an ended sequence are still written, so
        sequences that share them continue. But if the logits of an ended sequence contain NaN, its pages may contain
        NaN, too. Then the prefix cache forgets these pages, and the sequences that share them are computed again. A
        chunk before the end of a prompt has no logits to check, and counts as written.
        """
        if part.sequence.finish_reason is not None:
            if not part.samples or result.logits.is_finite(row + part.sampled_row):
                self._scheduler.advance(part, part.count - len(part.drafts))
            else:
                self._release([part.sequence], forget=True)
            return False
        if part.drafts:
            return not self._scheduler.ledger.is_void(part)
        return self._scheduler.advance(part, part.count)

    def _result(self, plan: StepPlan, forward: Callable[[], Logits]) -> StepResult:
        """Returns the result of a step's forward, and ends the sequences that failed."""
        try:
            return whole_result(plan, forward())
        except BatchAheadFailed as error:
            drop_tracebacks(error)
            self._scheduler.restarts.recompute([part.sequence for part in plan.parts])
            return no_result()
        except Exception as error:
            logger.error("%s failed", plan, exc_info=error)
            drop_tracebacks(error)
            self._check_devices()
            void = self._scheduler.restarts.isolate(plan.parts)
            result = in_halves(plan, void, self._run_again, error)
        failed: list[SequenceState] = []
        for part, failure in result.failures.items():
            phase = "prefill" if part.prefills else "decode"
            # A sequence without tokens computes the prompt for all sequences of its request.
            culprits = [part.sequence] if part.sequence.tokens else part.sequence.request.sequences
            for sequence in culprits:
                sequence.finish(FinishReason.ERROR, GenerationFailed(f"{phase} failed: {in_short(failure)}"))
            failed += culprits
        result.drop(self._release(failed, forget=True))
        return result

    def _run_again(self, batch: Batch) -> Logits:
        self.progress.at("a part of a step that failed", batch.tokens)
        return self._forward(batch, self._cache)

    # --- the end of sequences ---

    def _drop_closed(self) -> None:
        """Evicts the requests whose streams are closed, because ``poll`` may not have handled the closing yet."""
        requests = [scheduled.request for scheduled in self._scheduler.admitted]
        if closed := [request for request in requests if request.mailbox.closed_at is not None]:
            self.evict(closed)

    def _release(self, sequences: Iterable[SequenceState], *, forget: bool = False) -> list[SequenceState]:
        """Removes sequences from the scheduler and frees their pages, unless a step in flight computes the sequence.

        Returns the sequences that are computed again, because they share a page that a released sequence has not
        written.
        """
        gone = [sequence for sequence in sequences if sequence not in self._busy]
        self._drafter.forget(gone)
        return self._scheduler.release(gone, forget=forget)

    # --- counters ---

    def _count(self, step: _StepInFlight, result: StepResult) -> None:
        self.count(decode_steps=int(not all(part.prefills for part in result.rows)))
        if step.plan.prompt_tokens:
            self.count(prefill_tokens=sum(part.count for part in result.rows if part.prefills))
        moments = [(request, request.mailbox.closed_at) for request in step.requests]
        if closed := {request for request, at in moments if at is not None and at < step.began}:
            decoding = [part for part in step.plan.parts if not part.prefills]
            self.count(wasted_tokens=sum(part.sequence.request in closed for part in decoding))

    def _gauge(self) -> None:
        scheduler = self._scheduler
        self.stats = EngineStats(
            **self._counts,
            running_sequences=scheduler.running_sequences,
            waiting_requests=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting.tokens,
            prefilling_requests=scheduler.prefilling_requests,
            kv_cache_bytes=scheduler.ledger.used_bytes,
            kv_cache_budget=scheduler.limits.cache_bytes,
            prefix_cache_bytes=scheduler.ledger.cached_bytes,
            prefix_cache_hit_tokens=scheduler.hit_tokens,
            num_preemptions=scheduler.preemptions,
        )


def _end_unanswered(result: StepResult) -> None:
    """Ends the sequences that ask for no token, once their prompts are computed."""
    for part in result.rows:
        if part.samples and part.sequence.request.params.max_tokens == 0:
            for sequence in part.samples:
                sequence.finish(FinishReason.LENGTH)
