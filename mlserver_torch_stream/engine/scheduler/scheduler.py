"""Schedules the work of each step: which sequences decode, which chunks of prompts run beside them, and in which pages.

Decides and returns the work; it imports no torch, runs nothing and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.engine.cache.cache_spec import CacheSpec
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.scheduler.limits import SchedulerLimits, fits_alone
from mlserver_torch_stream.engine.scheduler.pages import AdmittedSequences, Busy, CachedSequences, added
from mlserver_torch_stream.engine.scheduler.plan import ScheduledSequence, SequenceAccount, StepDraft, StepPlan
from mlserver_torch_stream.engine.scheduler.queue import FairQueue

Drafts = Callable[[SequenceState, int], Sequence[int]]
"""Returns the tokens that are likely to follow a sequence, when so many sequences decode; none is fine."""


class Scheduler(CachedSequences):
    """Admits requests in the queue's order while there are places and pages, and plans each step.

    One step: ``plan = schedule(busy)``; the forward of ``plan.batch``; then for each part of the plan
    ``advance(part, tokens)``, then its sequences accept their tokens; then ``release`` of those that ended. Tokens
    verify the drafts of a part, so a part with drafts advances after its sequence has accepted them.

    A sequence takes pages from the admitted sequences after it: the last one is preempted, and computed again when its
    pages are free. So the first one always advances. The parts of a batch are in an order too: a part may read pages
    that one before it, or a batch before it, writes.
    """

    def __init__(self, limits: SchedulerLimits, spec: CacheSpec, drafts: Drafts | None = None) -> None:
        """``drafts`` guesses the next tokens of a sequence.

        A model with states, or one that takes prompts whole, cannot go on from pages alone: it gets no drafts and has
        no prefix cache.
        """
        goes_on = not spec.state_bytes and not limits.whole_prompts
        finds = goes_on and limits.prefix_bytes > 0  # else not even prompts beside each other share pages
        super().__init__(limits, spec, finds=finds)
        self.waiting = FairQueue()
        self.admitted = AdmittedSequences(limits, spec)
        self.preemptions = 0  # since the start
        self.hit_tokens = 0  # of prompts, found in the prefix cache, since the start
        self._drafts = drafts if goes_on else None
        self.open_prompts: list[RequestState] = []  # requests whose prompts are not whole yet

    # --- arrival and departure ---

    def refusal(self, sequences: int, prompt: int, final_length: int) -> str | None:
        """Returns why a request of this size could never run; None if it can."""
        if fits_alone(self.spec, self.limits, sequences, prompt, final_length):
            return None
        return (
            f"{sequences} x {final_length} tokens never fit at most {self.limits.max_num_seqs} sequences "
            f"and {format_bytes(self.limits.cache_bytes)} of KV cache"
        )

    def add(self, request: RequestState) -> None:
        first, *forks = request.sequences
        account = self._accounts[first] = SequenceAccount(first, self.spec, self._pool)
        account.forks = tuple(forks)
        if request.sealed:
            self.waiting.add(request)
        else:
            self.open_prompts.append(request)

    def release(self, sequences: Iterable[SequenceState], *, forget: bool = False) -> list[SequenceState]:
        """Takes back the pages of sequences that have ended, and removes them from every queue.

        With ``forget`` their pages cannot be found afterwards: they may hold NaN. Returns the sequences that are
        computed again, as they share pages that were not written: the result of their part is void.
        """
        leaving = [self._accounts.pop(each) for each in sequences if each in self._accounts]
        void = self._void(leaving)
        for account in leaving:
            if forget:
                account.pages.forget_all()
            self._clear(account)
            self._remove(account)
        return void

    def _remove(self, account: SequenceAccount) -> None:
        request = account.request
        self._given_up.discard(account)
        if account.admitted:
            self.admitted.remove(account)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request in self.open_prompts:
            self.open_prompts.remove(request)

    # --- the plan of a step ---

    def schedule(self, busy: Busy = ()) -> StepPlan:
        """Plans the next step. Takes no sequence of ``busy``, those of batches in flight, and leaves their pages."""
        self._queue_sealed(busy)
        decoding = self._to_decode(busy)
        draft = StepDraft(self.limits, self.spec.page_size, decodes=bool(decoding))
        for account in list(self.admitted):
            if account in decoding and not account.restarts:
                self._take(account, 1, draft, busy, decodes=True)
            elif account.left and not account.decodes and account.sequence not in busy:
                self._admit_all(draft, busy, account.priority)
                self._take_chunk(account, draft, busy)
        self._admit_all(draft, busy)
        self._take_open_prompts(draft, busy)
        self._take_drafts(draft)
        plan = draft.plan(self._state_copies)
        if plan:
            self._state_copies = []
        return plan

    def _queue_sealed(self, busy: Busy) -> None:
        """Lets the open prompts that are sealed now wait for admission."""
        for request in [each for each in self.open_prompts if each.sealed and each.sequences[0] not in busy]:
            self.open_prompts.remove(request)
            self._accounts[request.sequences[0]].cut(request.kept)
            self.waiting.add(request)

    def _to_decode(self, busy: Busy) -> set[SequenceAccount]:
        """Returns the sequences that may decode in this step: each stage of a pipeline gets its share of them."""
        decoding = [account for account in self.admitted if account.decodes]
        share = -(-len(decoding) // self.limits.stages)
        return set([account for account in decoding if account.sequence not in busy][:share])

    def _take(self, account: SequenceAccount, tokens: int, draft: StepDraft, busy: Busy, *, decodes: bool) -> None:
        """Adds the next ``tokens`` of an admitted sequence, or as many as there are pages for."""
        if decodes and account.pages.has_room:  # as most steps of most sequences
            draft.add(account, 1, decodes=True)
            return
        account.pages.drop_passed()
        without_preemption = self._fitting(account, tokens, lambda pages: self._make_room(account, pages, busy))
        if tokens := without_preemption or self._preempt(account, tokens, draft, busy):
            self._add(account, tokens, draft, decodes=decodes)

    def _add(self, account: SequenceAccount, tokens: int, draft: StepDraft, *, decodes: bool) -> None:
        assert account.part is None, "a part is neither in flight nor back"
        end = account.computed + tokens
        self._take_slot(account)
        copies = account.pages.extend(end)
        account.copied |= bool(copies)
        draft.copies += copies
        account.pages.name(end)
        account.restarts = False
        draft.add(account, tokens, decodes=decodes)

    def _take_chunk(self, account: SequenceAccount, draft: StepDraft, busy: Busy) -> None:
        if not draft.takes_prompts or (account.restarts and not self._may_restart(account)):
            return
        account.look_up()
        # Also where the prefix cache has all but its last token: the step was begun without it as one that decodes.
        self._take(account, draft.chunk(account.computed, account.left), draft, busy, decodes=False)

    def _may_restart(self, account: SequenceAccount) -> bool:
        """Whether a preempted sequence may begin again: its pages are free, or no sequence before it holds any.

        Otherwise it would be preempted again and again.
        """
        if not any(other.holds_something for other in self.admitted if other.order < account.order):
            return True
        return self._fits(account, added(account.needed(self.limits), self.admitted.soon_needed()))

    def _take_drafts(self, draft: StepDraft) -> None:
        """Adds drafts to the sequences that decode, as far as prompts and pages leave room."""
        if self._drafts is None:
            return
        for account in draft.decoding:
            sequence, pages = account.sequence, account.pages
            if draft.left <= 0 or not (drafts := self._drafts(sequence, len(draft.decoding))):
                continue
            most = int(min(draft.left, account.request.max_tokens - len(sequence.tokens) - 1))
            drafts = drafts[: max(0, most)]
            end = sequence.length + len(drafts)
            if drafts and self._pool.fits(pages.lacking(end)):
                pages.grow(end)
                draft.add_drafts(account, drafts)

    # --- admission ---

    def _admit_all(self, draft: StepDraft, busy: Busy, below: float = math.inf) -> None:
        """Admits requests with a priority number ``below`` this one as long as the step takes prompts."""
        admitted = True
        while admitted and draft.takes_prompts:
            admitted = self._admit(draft, busy, below)

    def _admit(self, draft: StepDraft, busy: Busy, below: float) -> bool:
        """Admits the next such request of the queue, and adds its first chunk. Returns False if there is none."""
        if not self.waiting:
            return False
        places, below = self.admitted.places, min(below, self.admitted.restarting_priority)
        if places <= 0 or not self.waiting.has_before(below):
            return False
        reserved = self.admitted.reserved()
        if not self._ahead and not self._pool.fits(reserved):
            return False  # now: a long queue would be looked up in the prefix cache for nothing

        def fits(request: RequestState) -> bool:
            if request.params.n > places or request.priority >= below:
                return False
            return self._prompt_fits(self._accounts[request.sequences[0]], reserved, busy)

        request = self.waiting.admit(fits)
        if request is None:
            return False
        account = self._accounts[request.sequences[0]]
        self._ahead.pop(account, None)
        self._given_up.discard(account)
        self.admitted.add(account)
        self._take_chunk(account, draft, busy)
        return True

    def _prompt_fits(self, account: SequenceAccount, reserved: list[int], busy: Busy) -> bool:
        """Whether there are pages for the whole prompt, beside the pages that it shares and the reserved ones."""
        account.look_up()
        needed = added(account.needed_with_forks(self.limits), reserved)
        if self._make_room(account, needed, busy, 1 + len(account.forks)):
            return True
        if account not in self._ahead:
            self._clear(account)
        return False

    # --- preemption ---

    def _preempt(self, account: SequenceAccount, tokens: int, draft: StepDraft, busy: Busy) -> int:
        """Preempts sequences after this one until it can have one page, or those of a prompt that is taken whole.

        Returns how many of the next ``tokens`` can have pages then.
        """
        size, start = self.spec.page_size, account.computed
        least = tokens if self.limits.whole_prompts else min(tokens, size - start % size)
        while not self._fits(account, account.pages.missing(start + least)):
            victim = self._victim(account, draft, busy)
            if victim is None:
                return 0
            self._restart(victim)
            self.preemptions += 1
        return least

    def _victim(self, account: SequenceAccount, draft: StepDraft, busy: Busy) -> SequenceAccount | None:
        """Returns the last sequence after this one that holds pages, and is neither in this step nor in flight."""
        after = takewhile(lambda each: each is not account, reversed(self.admitted))
        idle = (each for each in after if each.sequence not in busy and each not in draft)
        return next((each for each in idle if each.holds_something), None)

    # --- open prompts ---

    def _take_open_prompts(self, draft: StepDraft, busy: Busy) -> None:
        """Adds chunks of prompts that are not whole yet, in pages that no admitted sequence needs."""
        if self.limits.whole_prompts:
            return
        for request in self.open_prompts:
            account = self._accounts[request.sequences[0]]
            if account.sequence in busy or account in self._given_up or account.left <= 0 or not draft.takes_prompts:
                continue
            account.look_up()
            account.pages.drop_passed()
            tokens = draft.chunk(account.computed, account.left) if account.left > 0 else 0
            fits = partial(self._fits_beside, account, self.admitted.reserved())
            if tokens := self._fitting(account, tokens, fits):
                self._add(account, tokens, draft, decodes=False)
            if account.holds_something:
                self._ahead.pop(account, None)
                self._ahead[account] = None

    def _fits_beside(self, account: SequenceAccount, reserved: list[int], needed: list[int]) -> bool:
        return self._fits(account, added(needed, reserved))

    # --- after the forward ---

    def advance(self, part: ScheduledSequence, tokens: int) -> bool:
        """Counts the first ``tokens`` of a part as computed: ``part.count``, or less where drafts were rejected.

        Returns False if the part is void. After the end of a prompt the other sequences of its request go on from
        there.
        """
        if self.is_void(part):
            return False
        account = self._accounts[part.sequence]
        account.advance(part, tokens)
        if part.samples and not account.sequence.tokens:
            account.request.cached_tokens = account.found
            self.hit_tokens += account.found
            account.found = 0
            self._fork(account)
        return True

    def _fork(self, account: SequenceAccount) -> None:
        forks, account.forks = account.forks, ()
        for sequence in forks:
            if sequence.finish_reason is None:
                self.admitted.add_fork(self._twin(account, sequence), account)
