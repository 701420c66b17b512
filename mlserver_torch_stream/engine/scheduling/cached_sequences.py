"""Keeps the accounts of all sequences over one pool of pages, and decides which sequences are computed again.

Knows nothing of who comes first, nor of steps that are to come.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence

from mlserver_torch_stream.engine.kv_cache.cache_spec import CacheSpec
from mlserver_torch_stream.engine.kv_cache.page_pool import PagePool
from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.scheduling.scheduler_limits import SchedulerLimits
from mlserver_torch_stream.engine.scheduling.sequence_account import NO_SLOT, SequenceAccount
from mlserver_torch_stream.engine.scheduling.step_plan import ScheduledSequence

Busy = Collection[SequenceState]


class CachedSequences:
    """What each sequence holds of the KV cache: its pages, and the slot of its states.

    A sequence loses all of it, and is computed again, if its forward failed, or that of one whose pages it shares, or
    if others need its pages.
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
        self._given_up: set[SequenceAccount] = set()  # otherwise they would be prefilled and given up again and again

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

    # --- taking ---

    def _fits(self, account: SequenceAccount, needed: Sequence[int], sequences: int = 1) -> bool:
        """Whether so many pages can be had, and the state slots of so many sequences."""
        if not self.spec.state_bytes:
            return self._pool.fits(needed)
        slots = sequences - (account.slot != NO_SLOT)
        return slots <= len(self._slots) and self._pool.fits(needed, slots * self.spec.state_bytes)

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

    def _take_slot(self, account: SequenceAccount) -> None:
        if self.spec.state_bytes and account.slot == NO_SLOT:
            account.slot = heapq.heappop(self._slots)
            self._pool.reserve(self.spec.state_bytes)

    def _twin(self, account: SequenceAccount, sequence: SequenceState) -> SequenceAccount:
        """Returns the account of a sequence that goes on from where another one is."""
        twin = self._accounts[sequence] = SequenceAccount(sequence, self.spec, self._pool)
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
