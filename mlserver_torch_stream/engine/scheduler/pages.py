"""Keeps the accounts of admitted sequences over one pool of pages, and decides which are preempted."""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import count

from mlserver_torch_stream.engine.cache.cache_spec import CacheSpec
from mlserver_torch_stream.engine.cache.page_pool import PagePool
from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.scheduler.limits import SchedulerLimits
from mlserver_torch_stream.engine.scheduler.plan import NO_SLOT, Order, ScheduledSequence, SequenceAccount

Busy = Collection[SequenceState]


class CachedSequences:
    """What each sequence holds of the KV cache: its pages, and the slot of its states.

    A sequence loses all of it, and is computed again, if its forward failed, if the forward of a sequence whose pages
    it shares failed, or if another sequence needs its pages.
    """

    def __init__(self, limits: SchedulerLimits, spec: CacheSpec, *, finds: bool) -> None:
        """``finds`` is that of ``PagePool``."""
        self.limits = limits
        self.spec = spec
        self._pool = PagePool(spec, limits.pages, limits.cache_bytes, limits.prefix_bytes, finds=finds)
        self._slots = list(range(limits.max_num_seqs)) if spec.state_bytes else []
        self._state_copies: list[tuple[int, int]] = []
        self._accounts: dict[SequenceState, SequenceAccount] = {}
        # Prompts that hold pages and are not admitted; the one that grew least recently is first.
        self._ahead: dict[SequenceAccount, None] = {}
        self._given_up: set[SequenceAccount] = set()  # prompts that gave up their pages: they wait for admission

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages and states of sequences; a page that several sequences share counts once."""
        return self._pool.used_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of the pages that only the prefix cache holds."""
        return self._pool.cached_bytes

    def is_void(self, part: ScheduledSequence) -> bool:
        """Whether the result of a part is ignored: its sequence has left, or is computed again."""
        account = self._accounts.get(part.sequence)
        return account is None or account.part is not part

    # --- computing again ---

    def isolate(self, parts: Iterable[ScheduledSequence]) -> list[SequenceState]:
        """Prepares parts whose forward failed for being tried again, each alone.

        Returns the sequences that are computed again instead: the result of their part, in this batch or in a later
        one, is void. They share pages that were not written, or the batch had a copy for them, made or not.
        """
        void = self._void([self._accounts[part.sequence] for part in parts if part.sequence in self._accounts])
        return [*void, *self.recompute(())]

    def recompute(self, sequences: Iterable[SequenceState]) -> list[SequenceState]:
        """Computes sequences again whose forward failed. Returns all sequences whose parts are void now.

        Beside the given ones those are sequences that share their pages, and those with a copy in flight.
        """
        given = set(sequences)
        accounts = [account for each, account in self._accounts.items() if each in given or account.copied]
        void = self._void(accounts)
        for account in accounts:
            self._restart(account)
        return [*(account.sequence for account in accounts), *void]

    def _void(self, failed: Sequence[SequenceAccount]) -> list[SequenceState]:
        """Forgets the pages that the parts in flight should have written, and restarts the sequences that share them.

        They may have named further pages since, which other sequences share in turn.
        """
        found = [account for account in failed if account.part is not None]
        sharing: dict[SequenceAccount, None] = {}
        while found:
            pages = {page: account for account in found for page in account.pages.forget_unwritten()}
            left = [account for account in self._accounts.values() if account not in sharing] if pages else []
            found = [each for each in left if any(pages.get(page, each) is not each for page in each.pages)]
            sharing.update(dict.fromkeys(found))
        for account in sharing:
            self._restart(account)
        return [account.sequence for account in sharing]

    def doubt(
        self, parts: Iterable[ScheduledSequence], spoiled: Collection[SequenceState]
    ) -> Collection[SequenceState]:
        """Computes sequences again that may have NaN from other sequences of their step, and returns them.

        ``spoiled`` sequences have NaN in their logits. Some forwards write NaN to the tokens before them too, and so to
        pages that other sequences of the step read. A sequence is computed again if it is spoiled and shares pages that
        another part of the step wrote, or if it has no logits yet and shares pages that a spoiled sequence wrote. So
        among spoiled sequences that share pages the first one ends.
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
        account.restarts = account.admitted

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

    # --- pages and slots ---

    def _fitting(self, account: SequenceAccount, tokens: int, fits: Callable[[list[int]], bool]) -> int:
        """Returns how many of the next ``tokens`` can have pages. ``fits`` says whether so many pages are available."""
        size, start = self.spec.page_size, account.computed
        while tokens > 0:
            if fits(account.pages.missing(start + tokens)):
                return tokens
            tokens = 0 if self.limits.whole_prompts else (start + tokens - 1) // size * size - start
        return 0

    def _fits(self, account: SequenceAccount, needed: Sequence[int], sequences: int = 1) -> bool:
        """Whether so many pages are free, and the state slots of so many sequences."""
        if not self.spec.state_bytes:
            return self._pool.fits(needed)
        slots = sequences - (account.slot != NO_SLOT)
        return slots <= len(self._slots) and self._pool.fits(needed, slots * self.spec.state_bytes)

    def _make_room(self, account: SequenceAccount, needed: Sequence[int], busy: Busy, sequences: int = 1) -> bool:
        """Whether so many pages are free, if need be after prompts that are not admitted have given up theirs."""
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

    def _take_slot(self, account: SequenceAccount) -> None:
        if self.spec.state_bytes and account.slot == NO_SLOT:
            account.slot = heapq.heappop(self._slots)
            self._pool.reserve(self.spec.state_bytes)

    def _twin(self, account: SequenceAccount, sequence: SequenceState) -> SequenceAccount:
        """Returns the account of a sequence that goes on from the tokens of ``account``."""
        twin = self._accounts[sequence] = SequenceAccount(sequence, self.spec, self._pool)
        twin.began_anew = True
        if not self._fits(twin, [0] * len(self.spec.groups)):  # prompts that are not admitted hold the state slots
            twin.restarts = True
            return twin
        twin.pages = account.pages.fork(sequence.token_ids)
        self._take_slot(twin)
        if twin.slot != NO_SLOT:
            self._state_copies.append((account.slot, twin.slot))
            twin.copied = True
        return twin


# Tokens that each running sequence shall have pages for when a prompt is admitted. 150 requests of some 60 tokens, at
# most 32 at a time, in pages of 16 that are full: 0 leads to 32 preemptions in 206 steps, 8 to none in 224, 16 to none
# in 245.
_SOON = 8


class AdmittedSequences:
    """Yields the accounts by priority, then by admission, then by the sequence's index in its request."""

    def __init__(self, limits: SchedulerLimits, spec: CacheSpec) -> None:
        self._limits = limits
        self._spec = spec
        self._accounts: list[SequenceAccount] = []
        self._admissions = count()

    def __iter__(self) -> Iterator[SequenceAccount]:
        return iter(self._accounts)

    def __reversed__(self) -> Iterator[SequenceAccount]:
        return reversed(self._accounts)

    @property
    def running_sequences(self) -> int:
        """The number of sequences whose prompt has been computed."""
        return sum([bool(account.sequence.tokens) for account in self._accounts])

    @property
    def prefilling_requests(self) -> int:
        """The number of requests whose prompt is being computed."""
        return len(self._accounts) - self.running_sequences

    @property
    def places(self) -> int:
        """How many more sequences may be admitted."""
        return self._limits.max_num_seqs - sum(1 + len(account.forks) for account in self._accounts)

    @property
    def restarting_priority(self) -> float:
        """The lowest priority number of the sequences that have lost their pages; infinity without such sequences."""
        return min((account.priority for account in self._accounts if account.restarts), default=math.inf)

    def add(self, account: SequenceAccount) -> None:
        """Adds the sequence that computes the prompt of a request, after all sequences of the same priority."""
        self._insert(account, (account.request.priority, next(self._admissions), 0))

    def add_fork(self, fork: SequenceAccount, account: SequenceAccount) -> None:
        """Adds another sequence of the request whose prompt ``account`` has computed."""
        priority, admission, _ = account.order
        self._insert(fork, (priority, admission, fork.request.sequences.index(fork.sequence)))

    def _insert(self, account: SequenceAccount, order: Order) -> None:
        account.order, account.admitted = order, True
        insort(self._accounts, account, key=lambda each: each.order)

    def remove(self, account: SequenceAccount) -> None:
        self._accounts.remove(account)

    # --- reserved pages, of each group ---

    def soon_needed(self) -> list[int]:
        """Returns the pages that running sequences need soon: they are not preempted for a request that is admitted."""
        pages = math.ceil(self.running_sequences * min(1.0, _SOON / self._spec.page_size))
        return [pages] * len(self._spec.groups)

    def reserved(self) -> list[int]:
        """Returns the pages that running sequences need soon, and those that the rest of begun prompts needs."""
        reserved = self.soon_needed()
        for account in self._accounts:
            if not account.decodes and not account.restarts:
                reserved = added(reserved, account.needed_with_forks(self._limits))
        return reserved


def added(*pages: list[int]) -> list[int]:
    """Returns the sum of numbers of pages, for each group."""
    return [sum(each) for each in zip(*pages, strict=True)]
