"""Keeps the admitted sequences in their order, and says how many pages are reserved for them.

Knows nothing of the queue, nor of the parts of a step.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator
from itertools import count

from mlserver_torch_stream.engine.kv_cache.cache_spec import CacheSpec
from mlserver_torch_stream.engine.scheduling.scheduler_limits import SchedulerLimits
from mlserver_torch_stream.engine.scheduling.sequence_account import Order, SequenceAccount

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
