"""Keeps the accounts of all sequences over one pool of pages, and decides which sequences are computed again.

Knows nothing of the order of sequences, nor of the queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence

from mlserver_torch_stream.engine.kv_cache.cache_spec import CacheSpec
from mlserver_torch_stream.engine.kv_cache.page_pool import PagePool
from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.scheduling.scheduler_limits import SchedulerLimits
from mlserver_torch_stream.engine.scheduling.sequence_account import NO_SLOT, SequenceAccount
from mlserver_torch_stream.engine.scheduling.step_plan import ScheduledSequence

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
