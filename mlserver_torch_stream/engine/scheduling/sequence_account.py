"""Keeps what the scheduler knows of one sequence: its place in the order, its pages and slot, its part in flight.

Knows nothing of other sequences.
"""

from __future__ import annotations

from mlserver_torch_stream.engine.kv_cache.cache_spec import CacheSpec
from mlserver_torch_stream.engine.kv_cache.page_pool import PagePool
from mlserver_torch_stream.engine.kv_cache.sequence_pages import SequencePages
from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.scheduling.scheduler_limits import SchedulerLimits
from mlserver_torch_stream.engine.scheduling.step_plan import ScheduledSequence

NO_SLOT = -1

Order = tuple[int, int, int]  # priority, number of the admission, index in the request


class SequenceAccount:
    """``forks`` are the sequences of its request that go on from the end of the prompt that this one computes."""

    def __init__(self, sequence: SequenceState, spec: CacheSpec, pool: PagePool) -> None:
        self.sequence = sequence
        self.request = sequence.request  # kept alive here: the sequence does not do that
        self._spec = spec
        self.forks: tuple[SequenceState, ...] = ()
        self.pages = SequencePages(spec, pool, sequence.token_ids)
        self.slot = NO_SLOT
        self.order: Order = (0, 0, 0)
        self.part: ScheduledSequence | None = None  # planned, and not back from its forward
        self.found = 0  # tokens of the prompt that the prefix cache had
        self.admitted = False
        self.restarts = False  # it was admitted and has lost its pages
        self.began_anew = False  # so tokens that the prefix cache has are no hits any more
        self.copied = False  # a copy for it is not back from its forward: of a page, or of states

    @property
    def computed(self) -> int:
        return self.pages.computed

    @property
    def left(self) -> int:
        """Tokens that can be computed now. An open prompt keeps its last token, for the logits at its end."""
        return self.sequence.length - self.pages.computed - (not self.request.sealed)

    @property
    def decodes(self) -> bool:
        """Whether its newest token is all that it needs computed.

        A sequence that has lost its pages resumes, even where the prefix cache has all but its last token.
        """
        return bool(self.sequence.tokens) and not self.restarts and self.left == 1

    @property
    def priority(self) -> int:
        return self.order[0]

    @property
    def samples(self) -> tuple[SequenceState, ...]:
        """The sequences that get a token at the end of its tokens."""
        return (self.sequence, *[fork for fork in self.forks if fork.finish_reason is None])

    @property
    def holds_something(self) -> bool:
        return any(self.pages.held) or self.slot != NO_SLOT

    def needed(self, limits: SchedulerLimits) -> list[int]:
        """Returns how many more pages of each group it needs until all its tokens are computed."""
        tokens = self.sequence.length
        most = self._spec.most_pages(tokens, limits.chunk(tokens))
        return [max(0, pages - held) for pages, held in zip(most, self.pages.held, strict=True)]

    def needed_with_forks(self, limits: SchedulerLimits) -> list[int]:
        """Returns ``needed``, and the page of each group that each of its forks copies."""
        return [pages + len(self.forks) for pages in self.needed(limits)]

    def look_up(self) -> None:
        """Takes the pages that the prefix cache has of all tokens but the last one, whose logits are needed."""
        gained = self.pages.look_up(self.sequence.length - 1)
        if not self.began_anew:
            self.found += gained

    def advance(self, part: ScheduledSequence, tokens: int) -> None:
        """Counts the first ``tokens`` of its part, whose forward is back, as computed."""
        self.part = None
        self.copied = False
        self.pages.computed = part.start + tokens
        if part.drafts:  # those that are accepted may have filled pages
            self.pages.name(min(self.computed, self.sequence.length))
        self.pages.written = self.pages.named

    def cut(self, kept: int) -> None:
        """Keeps the computed ones of a prompt's first ``kept`` tokens, but leaves at least one token to compute."""
        self.pages.cut(min(kept, self.sequence.length - 1))
        self.found = min(self.found, self.pages.computed)
