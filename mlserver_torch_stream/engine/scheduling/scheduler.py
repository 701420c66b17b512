"""Schedules the work of each step: which sequences decode, which chunks of prompts run beside them, and in which pages.

Decides and returns the work; it imports no torch, runs nothing and reads no clock.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.engine.kv_cache.cache_spec import CacheSpec
from mlserver_torch_stream.engine.kv_cache.page_pool import PagePool
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.scheduling.fair_queue import FairQueue
from mlserver_torch_stream.engine.scheduling.scheduler_limits import SchedulerLimits, fits_alone
from mlserver_torch_stream.engine.scheduling.sequence_account import NO_SLOT, SequenceAccount
from mlserver_torch_stream.engine.scheduling.step_draft import StepDraft
from mlserver_torch_stream.engine.scheduling.step_plan import ScheduledSequence, StepPlan

Drafts = Callable[[SequenceState, int], Sequence[int]]
"""Returns the tokens that are likely to follow a sequence, when so many sequences decode; none is fine."""

# Tokens that each running sequence shall have pages for when a prompt is admitted. 150 requests of some 60 tokens, at
# most 32 at a time, in pages of 16 that are full: 0 leads to 32 preemptions in 206 steps, 8 to none in 224, 16 to none
# in 245.
_SOON = 8

Busy = Collection[SequenceState]


class Scheduler:
    """Admits requests in the queue's order while there are places and pages, and plans each step.

    One step: ``plan = schedule(busy)``; the forward of ``plan.batch``; then for each part of the plan
    ``advance(part, tokens)``, then its sequences accept their tokens, which verify the drafts of a part with drafts, so
    they come before; then ``release`` of those that ended.

    Admitted sequences are in one order: by priority, then by admission. A sequence takes pages from those after it:
    the last one is preempted, and computed again when its pages are free. So the first one always advances. The parts
    of a batch are in an order too: a part may read pages that one before it, or a batch before it, writes.
    """

    def __init__(self, limits: SchedulerLimits, spec: CacheSpec, drafts: Drafts | None = None) -> None:
        """``drafts`` guesses the next tokens of a sequence.

        A model with states, or one that takes prompts whole, cannot go on from pages alone: it gets no drafts and has
        no prefix cache.
        """
        self.limits = limits
        self.spec = spec
        self.waiting = FairQueue()
        self.preemptions = 0  # since the start
        self.hit_tokens = 0  # of prompts, found in the prefix cache, since the start
        goes_on = not spec.state_bytes and not limits.whole_prompts
        finds = goes_on and limits.prefix_bytes > 0  # else not even prompts beside each other share pages
        self._drafts = drafts if goes_on else None
        self._pool = PagePool(spec, limits.pages, limits.cache_bytes, limits.prefix_bytes, finds=finds)
        self._slots = list(range(limits.max_num_seqs)) if spec.state_bytes else []
        self._state_copies: list[tuple[int, int]] = []
        self._accounts: dict[SequenceState, SequenceAccount] = {}
        self._admitted: list[SequenceAccount] = []  # in their order
        self._open: list[RequestState] = []
        # Prompts that hold pages and are not admitted; the one that grew least recently is first.
        self._ahead: dict[SequenceAccount, None] = {}
        self._given_up: set[SequenceAccount] = set()  # otherwise they would be prefilled and given up again and again
        self._admissions = count()

    # --- gauges ---

    @property
    def running_sequences(self) -> int:
        """Admitted sequences whose prompt has been computed."""
        return sum(bool(account.sequence.tokens) for account in self._admitted)

    @property
    def prefilling_requests(self) -> int:
        """Admitted requests whose prompt is being computed."""
        return sum(not account.sequence.tokens for account in self._admitted)

    @property
    def open_prompts(self) -> int:
        """Requests whose prompts are not whole yet."""
        return len(self._open)

    @property
    def used_bytes(self) -> int:
        """Of the pages and states of sequences; a page that several share counts once."""
        return self._pool.used_bytes

    @property
    def cached_bytes(self) -> int:
        """Of the pages that only the prefix cache holds."""
        return self._pool.cached_bytes

    # --- what comes and goes ---

    def refusal(self, sequences: int, prompt: int, final_length: int) -> str | None:
        """Returns why a request of this size could never run; None if it can."""
        if fits_alone(self.spec, self.limits, sequences, prompt, final_length):
            return None
        return (
            f"{sequences} x {final_length} tokens never fit at most {self.limits.max_num_seqs} sequences "
            f"and {format_bytes(self.limits.cache_bytes)} of KV cache"
        )

    def add(self, request: RequestState) -> None:
        first, *others = request.sequences
        account = self._accounts[first] = SequenceAccount(first, self.spec, self._pool)
        account.forks = tuple(others)
        if request.sealed:
            self.waiting.add(request)
        else:
            self._open.append(request)

    def release(self, sequences: Iterable[SequenceState], *, forget: bool = False) -> list[SequenceState]:
        """Takes back the pages of sequences that have ended, and removes them from every queue.

        With ``forget`` nobody finds their pages afterwards: they may hold NaN. Returns the sequences that are computed
        again, as they share pages that were not written: the result of their part is void.
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
        request = account.sequence.request
        self._given_up.discard(account)
        if account in self._admitted:
            self._admitted.remove(account)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request in self._open:
            self._open.remove(request)

    def isolate(self, parts: Iterable[ScheduledSequence]) -> list[SequenceState]:
        """Prepares parts whose forward failed for being tried again, each alone.

        Returns the sequences that are computed again instead: the result of their part, in this batch or in one behind
        it, is void. They share pages that were not written, or the batch had a copy for them, which may be made or not.
        """
        void = self._void([self._accounts[part.sequence] for part in parts if part.sequence in self._accounts])
        return [*void, *self.recompute(())]

    def recompute(self, sequences: Iterable[SequenceState]) -> list[SequenceState]:
        """Computes sequences again whose forward failed. Returns them, and the others whose parts are void by that."""
        given = set(sequences)
        accounts = [account for each, account in self._accounts.items() if each in given or account.copied]
        void = self._void(accounts)
        for account in accounts:
            self._restart(account)
        return [*(account.sequence for account in accounts), *void]

    def _void(self, failed: Sequence[SequenceAccount]) -> list[SequenceState]:
        """Forgets the pages that the parts in flight should have written, and restarts the sequences that share them.

        Those may have named pages of their own meanwhile, which others share in turn.
        """
        found = [account for account in failed if account.part is not None]
        sharing: dict[SequenceAccount, None] = {}
        while found:
            pages = {page: account for account in found for page in account.pages.forget_unwritten()}
            others = [account for account in self._accounts.values() if account not in sharing] if pages else []
            found = [other for other in others if any(pages.get(page, other) is not other for page in other.pages)]
            sharing.update(dict.fromkeys(found))
        for account in sharing:
            self._restart(account)
        return [account.sequence for account in sharing]

    def doubt(
        self, parts: Iterable[ScheduledSequence], spoiled: Collection[SequenceState]
    ) -> Collection[SequenceState]:
        """Computes sequences again that may have NaN from others of their step. ``spoiled`` have NaN in their logits.

        Some forwards spoil the tokens before a NaN too, and with them pages that other sequences share at once. A
        sequence is doubted that is spoiled and shares pages which another part of the step wrote, or that has no logits
        yet and shares pages which a spoiled one wrote. So of those that share pages the first one ends.
        """
        size, writers = self.spec.page_size, dict[tuple[int, int], ScheduledSequence]()
        sampled = set[SequenceState]()
        for part in parts:
            sampled.update(part.samples)
            if part.sequence in self._accounts:
                pages = self._accounts[part.sequence].pages.from_page(part.start // size)
                writers.update(dict.fromkeys(pages, part))
        doubted = [
            account
            for sequence, account in self._accounts.items()
            if (sequence in spoiled or sequence not in sampled)
            and any(
                sequence is not writer.sequence
                and sequence not in writer.samples
                and (sequence in spoiled or writer.sequence in spoiled)
                for writer in {writers[page] for page in account.pages if page in writers}
            )
        ]
        for account in doubted:
            account.pages.forget_all()
        void = self._void(doubted)
        for account in doubted:
            self._restart(account)
        return {*void, *(account.sequence for account in doubted)}

    def _restart(self, account: SequenceAccount) -> None:
        self._clear(account)
        account.began_anew = True
        account.restarts = account in self._admitted

    def _clear(self, account: SequenceAccount) -> None:
        account.part = None
        account.copied = False
        account.found = 0
        account.pages.clear()
        self._ahead.pop(account, None)
        if account.slot != NO_SLOT:
            self._state_copies = [each for each in self._state_copies if each[1] != account.slot]
            heapq.heappush(self._slots, account.slot)
            account.slot = NO_SLOT
            self._pool.reserve(-self.spec.state_bytes)

    # --- the plan of a step ---

    def schedule(self, busy: Busy = ()) -> StepPlan:
        """Plans the next step. Takes no sequence of ``busy``, those of batches in flight, and leaves their pages."""
        self._take_whole(busy)
        decoding = self._to_decode(busy)
        draft = StepDraft(self.limits, self.spec.page_size, decodes=bool(decoding))
        for account in list(self._admitted):
            if account.sequence in busy or account.left == 0:
                continue
            if account.decodes:
                if account in decoding:
                    self._take(account, 1, draft, busy, decodes=True)
                continue
            self._admit_all(draft, busy, account.priority)
            self._take_chunk(account, draft, busy)
        self._admit_all(draft, busy)
        self._take_ahead(draft, busy)
        self._take_drafts(draft)
        copies = self._state_copies
        plan = draft.plan(copies)
        if plan:
            self._state_copies = []
        return plan

    def _take_whole(self, busy: Busy) -> None:
        """Lets the open prompts that are whole now wait for admission."""
        for request in [each for each in self._open if each.sealed and each.sequences[0] not in busy]:
            self._open.remove(request)
            self._accounts[request.sequences[0]].cut(request.kept)
            self.waiting.add(request)

    def _to_decode(self, busy: Busy) -> set[SequenceAccount]:
        """Returns the sequences that may decode in this step: each stage of a pipeline gets its share of them."""
        decoding = [account for account in self._admitted if account.decodes]
        share = -(-len(decoding) // self.limits.stages)
        return set([account for account in decoding if account.sequence not in busy][:share])

    def _take(self, account: SequenceAccount, tokens: int, draft: StepDraft, busy: Busy, *, decodes: bool) -> None:
        """Adds the next ``tokens`` of an admitted sequence, or as many as there are pages for."""
        if decodes and account.pages.has_room:  # as most steps of most sequences
            draft.add(account, 1, decodes=True)
            return
        account.pages.drop_passed()
        tokens = self._fitting(account, tokens, busy) or self._preempting(account, tokens, draft, busy)
        if tokens:
            self._add(account, tokens, draft, decodes=decodes)

    def _add(self, account: SequenceAccount, tokens: int, draft: StepDraft, *, decodes: bool) -> None:
        assert account.part is None, "a part is neither in flight nor back"
        draft.add(account, tokens, decodes=decodes)
        end = account.computed + tokens
        self._take_slot(account)
        copies = account.pages.extend(end)
        account.copied |= bool(copies)
        draft.copies += copies
        account.pages.name(end)
        account.restarts = False

    def _take_slot(self, account: SequenceAccount) -> None:
        if self.spec.state_bytes and account.slot == NO_SLOT:
            account.slot = heapq.heappop(self._slots)
            self._pool.reserve(self.spec.state_bytes)

    def _take_chunk(self, account: SequenceAccount, draft: StepDraft, busy: Busy) -> None:
        if not draft.takes_prompts or (account.restarts and not self._may_restart(account)):
            return
        account.look_up(account.sequence.length - 1)
        # Also where the prefix cache has all but its last token: the step was begun without it as one that decodes.
        self._take(account, draft.chunk(account.computed, account.left), draft, busy, decodes=False)

    def _may_restart(self, account: SequenceAccount) -> bool:
        """Whether a preempted sequence may begin again: its pages are free, or no sequence before it holds any.

        Otherwise it would be preempted again and again.
        """
        needed = self._needed(account, account.sequence.length)
        before = any(other.holds_something for other in self._admitted if other.order < account.order)
        return not before or self._fits(account, self._plus(needed, self._margin()))

    def _take_drafts(self, draft: StepDraft) -> None:
        """Adds drafts to the sequences that decode, as far as prompts and pages leave room."""
        for part in draft.decoding if self._drafts is not None else ():
            sequence, pages = part.account.sequence, part.account.pages
            most = int(min(draft.left, sequence.request.max_tokens - len(sequence.tokens) - 1))
            drafts = (
                list(self._drafts(sequence, len(draft.decoding))[:most])
                if most > 0 and self._drafts is not None
                else []
            )
            end = part.start + part.count + len(drafts)
            if drafts and self._pool.fits(pages.lacking(end)):
                pages.grow(end)
                draft.add_drafts(part, drafts)

    # --- admission ---

    def _admit_all(self, draft: StepDraft, busy: Busy, before: float = math.inf) -> None:
        """Admits requests of a priority ``before`` a number as long as the step takes prompts."""
        admitted = True
        while admitted and draft.takes_prompts:
            admitted = self._admit(draft, busy, before)

    def _admit(self, draft: StepDraft, busy: Busy, before: float = math.inf) -> bool:
        """Admits the next request of the queue, of a priority ``before`` a number, and adds its first chunk.

        Returns False if none can be admitted.
        """
        places = self.limits.max_num_seqs - sum(1 + len(account.forks) for account in self._admitted)
        if places <= 0 or not self.waiting.has_before(before):
            return False
        restarting = min((account.priority for account in self._admitted if account.restarts), default=math.inf)
        reserved = self._plus(self._margin(), self._promised())

        if not self._ahead and not self._pool.fits(reserved):
            return False  # at once: a long queue is not looked up in the prefix cache for nothing

        def place(request: RequestState) -> SequenceAccount | None:
            fits = request.params.n <= places and request.priority < min(before, restarting)
            return self._place(self._accounts[request.sequences[0]], reserved, busy) if fits else None

        admitted = self.waiting.admit(place)
        if admitted is None:
            return False
        request, account = admitted
        account.order = (request.priority, next(self._admissions), 0)
        self._ahead.pop(account, None)
        self._given_up.discard(account)
        insort(self._admitted, account, key=lambda each: each.order)
        self._take_chunk(account, draft, busy)
        return True

    def _place(self, account: SequenceAccount, reserved: Sequence[int], busy: Busy) -> SequenceAccount | None:
        """Returns the account if the pages of its whole prompt are there, less those that it shares."""
        account.look_up(account.sequence.length - 1)
        needed = self._needed(account, account.sequence.length)
        needed = [count + more + len(account.forks) for count, more in zip(needed, reserved, strict=True)]
        if self._make_room(account, needed, busy, 1 + len(account.forks)):
            return account
        if account not in self._ahead:
            self._clear(account)
        return None

    def _needed(self, account: SequenceAccount, tokens: int) -> list[int]:
        """Returns how many more pages of each group a sequence needs until ``tokens`` of it are computed."""
        step = self.limits.chunk(tokens)
        return [
            max(0, self.spec.most_pages(group, tokens, step) - held) for group, held in enumerate(account.pages.held)
        ]

    def _margin(self) -> list[int]:
        """Returns the pages that sequences which decode will need soon: they are not preempted for a newcomer."""
        soon = min(1.0, _SOON / self.spec.page_size)
        return [math.ceil(self.running_sequences * soon)] * len(self.spec.groups)

    def _promised(self) -> list[int]:
        """Returns the pages that the rest of begun prompts needs."""
        promised = [0] * len(self.spec.groups)
        for account in self._admitted:
            if not account.decodes and not account.restarts:
                needed = self._needed(account, account.sequence.length)
                promised = [have + more + len(account.forks) for have, more in zip(promised, needed, strict=True)]
        return promised

    @staticmethod
    def _plus(one: Sequence[int], other: Sequence[int]) -> list[int]:
        return [left + right for left, right in zip(one, other, strict=True)]

    # --- pages ---

    def _fits(self, account: SequenceAccount, needed: Sequence[int], sequences: int = 1) -> bool:
        """Whether so many pages can be had, and the state slots of so many sequences."""
        if not self.spec.state_bytes:
            return self._pool.fits(needed)
        slots = sequences - (account.slot != NO_SLOT)
        return slots <= len(self._slots) and self._pool.fits(needed, slots * self.spec.state_bytes)

    def _fitting(self, account: SequenceAccount, tokens: int, busy: Busy) -> int:
        """Returns how many of the next ``tokens`` there are pages for, without those of other admitted sequences."""
        size, start = self.spec.page_size, account.computed
        while tokens > 0:
            if self._make_room(account, account.pages.missing(start + tokens), busy):
                return tokens
            whole = self.limits.whole_prompts
            tokens = 0 if whole else (start + tokens - 1) // size * size - start
        return 0

    def _preempting(self, account: SequenceAccount, tokens: int, draft: StepDraft, busy: Busy) -> int:
        """Preempts sequences after this one until one page is left, or the pages of a prompt that is taken whole."""
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
        for other in reversed(self._admitted):
            if other is account:
                return None
            if other.sequence not in busy and other not in draft and other.holds_something:
                return other
        return None

    # --- open prompts ---

    def _take_ahead(self, draft: StepDraft, busy: Busy) -> None:
        """Adds chunks of prompts that are not whole yet, in pages that no admitted sequence needs."""
        if self.limits.whole_prompts:
            return
        for request in self._open:
            account = self._accounts[request.sequences[0]]
            if account.sequence in busy or account in self._given_up or account.left <= 0 or not draft.takes_prompts:
                continue
            account.look_up(account.sequence.length - 1)
            account.pages.drop_passed()
            if (tokens := self._fitting_ahead(account, draft)) > 0:
                self._add(account, tokens, draft, decodes=False)
            if account.holds_something:
                self._ahead.pop(account, None)
                self._ahead[account] = None

    def _fitting_ahead(self, account: SequenceAccount, draft: StepDraft) -> int:
        reserved = self._plus(self._margin(), self._promised())
        tokens = draft.chunk(account.computed, account.left) if account.left > 0 else 0
        while tokens > 0:
            missing = account.pages.missing(account.computed + tokens)
            if self._fits(account, self._plus(missing, reserved)):
                return tokens
            size = self.spec.page_size
            tokens = (account.computed + tokens - 1) // size * size - account.computed
        return 0

    def _make_room(self, account: SequenceAccount, needed: Sequence[int], busy: Busy, sequences: int = 1) -> bool:
        """Whether so many pages can be had, when prompts that are not admitted give up theirs."""
        if self._fits(account, needed, sequences):
            return True
        spare = [other for other in self._ahead if other is not account and other.sequence not in busy]
        held = [sum(each) for each in zip(*(other.pages.held for other in spare), strict=True)]
        if held and not self._pool.fits([most - least for most, least in zip(needed, held, strict=True)]):
            return False
        for other in spare:
            self._clear(other)
            other.began_anew = True
            self._given_up.add(other)
            if self._fits(account, needed, sequences):
                return True
        return False

    # --- after the forward ---

    def is_void(self, part: ScheduledSequence) -> bool:
        """Whether the result of a part is ignored: its sequence has left, or is computed again."""
        account = self._accounts.get(part.sequence)
        return account is None or account.part is not part

    def advance(self, part: ScheduledSequence, tokens: int) -> bool:
        """Counts the first ``tokens`` of a part as computed: ``part.count``, or less where drafts were rejected.

        Returns False if the part is void. After the end of a prompt the other sequences of its request go on from
        there.
        """
        if self.is_void(part):
            return False
        account = self._accounts[part.sequence]
        account.part = None
        account.copied = False
        account.pages.computed = part.start + tokens
        if part.drafts:  # those that are accepted may have filled pages
            account.pages.name(min(account.computed, account.sequence.length))
        account.pages.written = account.pages.named
        if part.samples and not account.sequence.tokens:
            account.sequence.request.cached_tokens = account.found
            self.hit_tokens += account.found
            account.found = 0
            self._fork(account)
        return True

    def _fork(self, account: SequenceAccount) -> None:
        forks, account.forks = account.forks, ()
        for sequence in forks:
            if sequence.finish_reason is None:
                self._accounts[sequence] = twin = self._twin(account, sequence)
                insort(self._admitted, twin, key=lambda each: each.order)

    def _twin(self, account: SequenceAccount, sequence: SequenceState) -> SequenceAccount:
        twin = SequenceAccount(sequence, self.spec, self._pool)
        priority, admission, _ = account.order
        twin.order = (priority, admission, sequence.request.sequences.index(sequence))
        twin.began_anew = True
        if not self._fits(twin, [0] * len(self.spec.groups)):  # prompts that are not admitted hold the state slots
            twin.restarts = True
            return twin
        twin.pages = account.pages.fork(twin.token_ids)
        self._take_slot(twin)
        if twin.slot != NO_SLOT:
            self._state_copies.append((account.slot, twin.slot))
            twin.copied = True
        return twin
