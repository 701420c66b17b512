"""A model of an engine around the real scheduler. Its memory records from which tokens each key was computed.

Needs no torch. As in a transformer, the key at a position and the next token depend on all tokens up to there.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlserver_torch_stream.engine.api import EngineRequest, Mailbox
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence, CacheSpec
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.scheduler.ledger import ScheduledSequence, StepPart
from mlserver_torch_stream.engine.scheduler.queue import PromptBudget, SchedulerLimits
from mlserver_torch_stream.engine.scheduler.scheduler import Scheduler, StepPlan
from mlserver_torch_stream.engine.text.tokenizer import WindowDetokenizer
from mlserver_torch_stream.types import FinishReason, SamplingParameters

CONTEXT = 120
POISON = -1


LETTERS = "abc"  # texts of the tokens that are chosen


class Codec:
    special_ids: frozenset[int] = frozenset()

    def detokenizer(self, skip_special_tokens: bool, marks: frozenset[int]) -> WindowDetokenizer:
        return WindowDetokenizer(partial(self.decode, skip_special_tokens=skip_special_tokens), marks)

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        return "".join(LETTERS[token] for token in ids)


LOOP = asyncio.new_event_loop()
LOOP.close()


def request_of(
    prompt: Sequence[int],
    max_tokens: int,
    n: int = 1,
    *,
    priority: int = 0,
    context: int = CONTEXT,
    stop: tuple[str, ...] = (),
) -> RequestState:
    sampling = SamplingParameters(max_tokens=max_tokens, n=n, stop=stop)
    given = EngineRequest(tuple(prompt), sampling, priority=priority)
    return RequestState(given, Mailbox(LOOP, n, lambda mailbox: None), Codec(), (), context)  # type: ignore[arg-type]


def key_after(key: int, token: int) -> int:
    return hash((key, token)) & 0xFFFFFFFFFFFF


def choice(key: int, index: int) -> int:
    """Returns the next token at this index, one of only two or three, so that texts often share their beginnings."""
    return (key >> 5) % 2 if index == 0 else (key >> (7 + index)) % 3


def expected(prompt: Sequence[int], index: int, count: int) -> list[int]:
    key, tokens = 0, list[int]()
    for token in prompt:
        key = key_after(key, token)
    for _ in range(count):
        tokens.append(choice(key, index))
        key = key_after(key, tokens[-1])
    return tokens


@dataclass
class ModelledForward:
    """Simulates pages and state slots.

    For each sequence, ``run`` returns its new keys, or None if it read wrong ones.
    """

    spec: CacheSpec
    keys: dict[tuple[int, int, int], int] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=dict)

    def prepare(self, batch: Batch) -> None:
        for group, source, target in batch.copies:
            for offset in range(self.spec.page_size):
                self.keys[group, target, offset] = self.keys.get((group, source, offset), POISON)
        for source, target in batch.state_copies:
            self.states[target] = self.states[source]

    def run(self, batch: Batch, true_ids: Sequence[Sequence[int]]) -> list[list[int] | None]:
        written: Counter[tuple[int, int, int]] = Counter()
        found = [self._run(part, ids, written) for part, ids in zip(batch.sequences, true_ids, strict=True)]
        assert not written or max(written.values()) == 1, "two sequences write to one place"
        # A layer writes all keys before it attends: nobody's keys may have gone under another's.
        for part, ids, keys in zip(batch.sequences, true_ids, found, strict=True):
            assert keys is None or self._sees(part, ids, part.start, part.length)
        return found

    def _run(self, part: BatchSequence, ids: Sequence[int], written: Counter[tuple[int, int, int]]) -> list[int] | None:
        assert list(ids) == list(part.token_ids) or len(ids) == part.length
        right = self._sees(part, ids, part.start, part.start)
        if self.spec.state_bytes:
            assert part.state_slot >= 0
            right = right and (part.start == 0 or self.states.get(part.state_slot) == _keys(ids)[part.start - 1])
        keys = _keys(ids)
        for position in range(part.start, part.length):
            for place in self._places(part, position):
                self.keys[place] = keys[position]
                written[place] += 1
        if self.spec.state_bytes:
            self.states[part.state_slot] = keys[-1] if right else POISON
        return keys[part.start :] if right else None

    def poison(self, batch: Batch) -> None:
        """Overwrites everything that a failed forward may have written."""
        for part in batch.sequences:
            for position in range(part.start, part.length):
                for place in self._places(part, position):
                    self.keys[place] = POISON
            self.states[part.state_slot] = POISON

    def _sees(self, part: BatchSequence, ids: Sequence[int], start: int, stop: int) -> bool:
        """Returns whether queries from ``part.start`` on find the right keys at all positions before ``stop``."""
        keys = _keys(ids)
        for group, layers in enumerate(self.spec.groups):
            for position in range(layers.oldest_seen(part.start), stop):
                page = part.tables[group][position // self.spec.page_size]
                assert page >= 0, "a page that is seen was given back"
                if self.keys.get((group, page, position % self.spec.page_size)) != keys[position]:
                    return False
        return True

    def _places(self, part: BatchSequence, position: int) -> list[tuple[int, int, int]]:
        index, offset = divmod(position, self.spec.page_size)
        return [(group, table[index], offset) for group, table in enumerate(part.tables)]


def _keys(ids: Sequence[int]) -> list[int]:
    keys, key = [], 0
    for token in ids:
        key = key_after(key, token)
        keys.append(key)
    return keys


def _tables(plan: StepPlan) -> list[list[list[int]]]:
    return [[list(table) for table in each.tables] for each in plan.batch.sequences]


@dataclass
class _InFlight:
    plan: StepPlan
    ids: list[list[int]]
    found: list[list[int] | None] | None  # None: its forward failed
    culprit: int | None
    tables: list[list[list[int]]]  # as they were at its launch


class ModelledEngine:
    """Does with a scheduler what the batcher does, without tensors. Checks all invariants after each step."""

    def __init__(self, limits: SchedulerLimits, spec: CacheSpec, drafts: Any = None, overlap: bool = False) -> None:
        """With ``overlap``, the next batches are launched before the text of the last one is made."""
        self.limits, self.spec, self.overlap = limits, spec, overlap
        self.scheduler = Scheduler(limits, spec, drafts)
        self.forward = ModelledForward(spec)
        self.prompt_budget: Callable[[], PromptBudget | None] = lambda: None  # of the next step
        self.in_flight: deque[_InFlight] = deque()
        self.requests: list[RequestState] = []
        self.prefilled = 0
        self.largest = 0
        self.passed: Counter[SequenceState] = Counter()  # plans in a row without a sequence that decodes
        self.started: dict[RequestState, None] = {}  # in this order
        self.fail_next: int | None = None
        self.void: set[SequenceState] = set()  # sequences whose parts may come back in vain

    @property
    def busy(self) -> set[SequenceState]:
        return {part.sequence for each in self.in_flight for part in each.plan.parts}

    @property
    def idle(self) -> bool:
        return not self.in_flight and all(request.finished for request in self.requests)

    def add(self, request: RequestState) -> bool:
        """Submits a request as the engine does. Returns False if the request is refused."""
        if self.refuses(request):
            return False
        self.requests.append(request)
        self.scheduler.add(request)
        return True

    def refuses(self, request: RequestState) -> bool:
        prompt = len(request.prompt)
        final = min(CONTEXT, prompt + (request.params.max_tokens or CONTEXT))
        return prompt >= CONTEXT or self.scheduler.refusal(request.params.n, prompt, final) is not None

    def step(self) -> StepPlan:
        """Launches as many batches as there are stages, and completes the oldest."""
        first = self.launch_all()
        assert self.in_flight or self.idle, "an engine with work has nothing to run"
        if self.in_flight:
            flight = self.in_flight.popleft()
            self.complete(flight)
            self.check()
            if self.overlap:
                self.launch_all()
            self.write(flight)
            self.check()
        return first

    def launch_all(self) -> StepPlan:
        first = StepPlan()
        while len(self.in_flight) < self.limits.stages:
            budget, busy = self.prompt_budget(), self.busy
            ready = [each for each in self.scheduler.admitted if each.sequence not in busy]
            decoding = [each for each in ready if each.decodes]
            prompts = [each for each in ready if not each.decodes and not each.restarts]
            if not (plan := self.scheduler.schedule(busy, budget)):
                break
            first = first or plan
            self.check_plan(plan, budget)
            self.check_progress(plan, budget, decoding, prompts)
            self.launch(plan)
            self.check()
        return first

    def check_plan(self, plan: StepPlan, prompt_budget: PromptBudget | None) -> None:
        assert [each.count for each in plan.parts] == [each.count for each in plan.batch.sequences]
        sequences = [each.sequence for each in plan.parts]
        assert len(set(sequences)) == len(sequences)
        assert not self.busy & set(sequences)
        prompts = [each for each in plan.parts if each.prefills]
        tokens = sum(each.count for each in prompts) + sum(len(each.drafts) for each in plan.parts)
        if self.limits.whole_prompts:
            assert len(prompts) <= 1
            assert all(part.samples and (part.start == 0 or part.count == 1) for part in plan.parts)
        elif self.limits.token_budget is not None:
            assert tokens <= self.limits.token_budget
            if self.limits.beside_budget is not None and len(prompts) < len(plan.parts):
                assert tokens <= self.limits.beside_budget
        drafts = sum(len(each.drafts) for each in plan.parts)
        assert prompt_budget is None or drafts <= max(0, prompt_budget.most_drafts)
        if prompts and prompt_budget is not None and not self.limits.whole_prompts:
            if not prompt_budget.least and len(prompts) == len(plan.parts):
                prompt_budget = PromptBudget(math.inf)  # nothing else could run
            cost = sum(prompt_budget.cost_of(part.start, part.count) for part in prompts)
            single = len(prompts) * prompt_budget.cost_of(CONTEXT, 1)  # each prompt gets a token at least
            least = max(prompt_budget.least, self.limits.prefill_floor)
            assert cost <= max(0.0, prompt_budget.cost) + single or prompts[0].count <= least
        self.largest = max(self.largest, tokens)

    def check_progress(
        self,
        plan: StepPlan,
        prompt_budget: PromptBudget | None,
        decoding: Sequence[ScheduledSequence],
        prompts: Sequence[ScheduledSequence],
    ) -> None:
        """Checks that each decoding sequence and the first prompt are in the plan, if there are pages for them."""
        parts, ledger = {part.sequence: part for part in plan.parts}, self.scheduler.ledger
        idle = [each for each in decoding if each.sequence not in parts and not each.restarts]
        idle = [each for each in idle if ledger.fits_for(each, each.pages.missing(each.computed + 1))]
        self.passed = Counter({each.sequence: self.passed[each.sequence] + 1 for each in idle})
        most = 2 * (self.limits.stages - 1)  # a stage takes its share, in the order of admission
        assert max(self.passed.values(), default=0) <= most, "a sequence that decodes starves"
        if not prompts or prompts[0].restarts or (prompt_budget is not None and not prompt_budget.least):
            return
        first, size = prompts[0], self.spec.page_size
        if any(part.prefills and ledger[part.sequence].order < first.order for part in plan.parts):
            return  # a preempted sequence, or a prompt of a higher priority, comes first
        if first.sequence not in parts:
            assert not ledger.fits_for(first, first.pages.missing(first.computed + 1)), "the oldest prompt starves"
            return
        part, limit = parts[first.sequence], self.limits.budget(decodes=bool(decoding))
        least = max(size if prompt_budget is None else prompt_budget.least, self.limits.prefill_floor)
        to_page = size - part.start % size
        left = first.sequence.length - part.start
        short = part.count < min(left, to_page, least, limit)
        assert not short or not ledger.fits_for(first, first.pages.missing(part.start + part.count + 1))

    def launch(self, plan: StepPlan) -> None:
        self.started.update(dict.fromkeys(part.sequence.request for part in plan.parts))
        ids = [self._ids(part) for part in plan.parts]
        culprit, self.fail_next = self.fail_next, None
        if culprit is None or culprit % 2:  # a forward that fails may have made the copies, or not
            self.forward.prepare(plan.batch)
        if culprit is not None:
            self.forward.poison(plan.batch)
            found = None
        else:
            found = self.forward.run(plan.batch, ids)
        self.void -= {part.sequence for part in plan.parts}
        self.in_flight.append(_InFlight(plan, ids, found, culprit, _tables(plan)))

    def _ids(self, part: StepPart) -> list[int]:
        sequence, end = part.sequence, part.start + part.count
        return [*sequence.request.prompt, *sequence.tokens, *part.drafts][:end]

    def complete(self, flight: _InFlight) -> None:
        assert _tables(flight.plan) == flight.tables, "a table has changed under a forward"
        if flight.found is None:
            assert flight.culprit is not None
            self.retry(flight, flight.culprit)
        else:
            for part, keys in zip(flight.plan.parts, flight.found, strict=True):
                self.take(part, keys)
        self.leave([part.sequence for part in flight.plan.parts])

    def retry(self, flight: _InFlight, culprit: int) -> None:
        """After a failure, runs each sequence alone, or computes all again, as states may have advanced."""
        parts = flight.plan.parts
        guilty = parts[culprit % len(parts)].sequence.request
        guilty.finish(FinishReason.ERROR)
        if self.spec.state_bytes or culprit % 3 == 0:
            self.void.update(self.scheduler.restarts.recompute([part.sequence for part in parts]))
        else:
            self.void.update(self.scheduler.restarts.isolate(parts))
        gone = [each for each in guilty.sequences if each not in self.busy]
        self.void.update(self.scheduler.release(gone, forget=culprit % 2 == 0))
        for part, batched, ids in zip(parts, flight.plan.batch.sequences, flight.ids, strict=True):
            valid = not self.scheduler.ledger.is_void(part)
            assert part.sequence in self.void or part.sequence in gone or valid
            if valid:
                (keys,) = self.forward.run(Batch((batched,)), [ids])
                self.take(part, keys)

    def take(self, part: StepPart, keys: list[int] | None) -> None:
        if part.sequence.finish_reason is not None:
            assert not self.scheduler.advance(part, part.count - len(part.drafts)) or keys is not None
            return
        index, right = part.sequence.index, 0
        if keys is not None and part.drafts:  # accepted: those that would have been chosen
            base = part.count - len(part.drafts)
            while right < len(part.drafts) and part.drafts[right] == choice(keys[base - 1 + right], index):
                right += 1
        accepted = part.count - len(part.drafts) + right
        if not self.scheduler.advance(part, accepted):
            assert part.sequence in self.void, "a sequence was preempted while its batch was in flight"
            return
        assert keys is not None, "a part that counts has read keys of other tokens"
        if part.prefills:
            self.prefilled += part.count
        for sequence in part.samples:
            for draft in part.drafts[:right]:
                self.token(sequence, draft)
            self.token(sequence, choice(keys[accepted - 1], sequence.index))

    def token(self, sequence: SequenceState, token: int) -> None:
        if not sequence.ended:
            sequence.accept(token, None)

    def write(self, flight: _InFlight) -> None:
        for part in flight.plan.parts:
            for sequence in part.samples:
                sequence.write()
        self.leave([part.sequence for part in flight.plan.parts])

    def leave(self, sequences: Sequence[SequenceState]) -> None:
        busy = self.busy
        requests = dict.fromkeys(sequence.request for sequence in sequences)
        ended = [each for request in requests for each in request.sequences if each.ended]
        # A sequence that ends in flight has not written its pages: the result of those that share them is void.
        self.void.update(self.scheduler.release([each for each in ended if each not in busy]))

    def cancel(self, request: RequestState) -> None:
        for sequence in request.sequences:
            sequence.finish(FinishReason.ABORT)
        self.leave(request.sequences)
        self.check()

    def forget(self, sequence: SequenceState) -> None:
        sequence.finish(FinishReason.ERROR)
        self.scheduler.release([sequence], forget=True)
        self.check()

    def run(self, most: int = 3_000) -> None:
        for _ in range(most):
            if self.idle:
                return
            self.step()
        raise AssertionError("not every sequence ends")

    # --- invariants ---

    def check(self) -> None:
        scheduler, ledger = self.scheduler, self.scheduler.ledger
        pool, sequences = ledger._pool, list(ledger._sequences.values())
        held = Counter(page for scheduled in sequences for page in scheduled.pages)
        used = cached = 0
        for group, pages in enumerate(pool._groups):
            size = self.spec.page_bytes(group)
            assert pages.references == {page: count for (of, page), count in held.items() if of == group}
            free = [*pages.free, *range(pages.fresh, pages.pages)]
            everything = [*free, *pages.references, *pages.cached]
            assert sorted(everything) == list(range(pages.pages)), "a page is lost, or has two places"
            assert {digest: page for page, digest in pages.digests.items()} == pages.found
            assert not set(free) & set(pages.digests)
            used += size * len(pages.references)
            cached += size * len(pages.cached)
        slots = [scheduled.slot for scheduled in sequences if scheduled.slot >= 0]
        assert len(set(slots)) == len(slots)
        if self.spec.state_bytes:
            assert sorted([*slots, *ledger._slots]) == list(range(self.limits.max_num_seqs))
        assert ledger.used_bytes == used + len(slots) * self.spec.state_bytes
        assert ledger.cached_bytes == cached <= self.limits.prefix_bytes
        assert ledger.used_bytes + cached <= self.limits.cache_bytes
        assert sum(1 + len(scheduled.forks) for scheduled in scheduler.admitted) <= self.limits.max_num_seqs
        assert [each.order for each in scheduler.admitted] == sorted(each.order for each in scheduler.admitted)

    def check_end(self) -> None:
        """Checks that all sequences have the tokens that they would have alone, and that no memory is in use."""
        self.check()
        scheduler = self.scheduler
        assert not (scheduler.ledger._sequences or scheduler.admitted or scheduler.has_prompts)
        assert not (scheduler.waiting or scheduler.waiting.tokens or scheduler.waiting._backlog)
        assert not (scheduler.waiting._overtaken or scheduler.ledger.state_copies)
        assert scheduler.ledger.used_bytes == 0
        for request in self.requests:
            for sequence in request.sequences:
                assert sequence.finish_reason is not None
                count = len(sequence.tokens)
                assert sequence.tokens == expected(request.prompt, sequence.index, count)
                text = "".join(LETTERS[token] for token in sequence.tokens)
                assert (sequence.finish_reason is FinishReason.STOP) == any(
                    stop in text for stop in request.params.stop
                )
                assert not any(stop in text[:-1] for stop in request.params.stop), "a token behind a stop string"
                *_, last = sequence.take_events()
                assert last.usage is not None and last.usage.num_output_tokens == count
                if sequence.finish_reason is FinishReason.LENGTH:
                    assert count == request.max_tokens
