"""Keeps what the scheduler knows of one sequence: its place in the order, its pages and slot, its part in flight.

Knows nothing of other sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlserver_torch_stream.engine.kv_cache.cache_spec import CacheSpec
from mlserver_torch_stream.engine.kv_cache.page_pool import PagePool
from mlserver_torch_stream.engine.kv_cache.sequence_pages import SequencePages
from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.scheduling.step_plan import ScheduledSequence

NO_SLOT = -1

Order = tuple[int, int, int]  # priority, number of the admission, index in the request


class SequenceAccount:
    """``forks`` are the sequences of its request that go on from the end of the prompt that this one computes."""

    def __init__(self, sequence: SequenceState, spec: CacheSpec, pool: PagePool) -> None:
        self.sequence = sequence
        self.forks: tuple[SequenceState, ...] = ()
        self.pages = SequencePages(spec, pool, self.token_ids)
        self.slot = NO_SLOT
        self.order: Order = (0, 0, 0)
        self.part: ScheduledSequence | None = None  # planned, and not back from its forward
        self.found = 0  # tokens of the prompt that the prefix cache had
        self.admitted = False
        self.restarts = False  # it was admitted and has lost its pages
        self.began_anew = False
        self.copied = False  # a copy for it is not back from its forward: of a page, or of states

    @property
    def computed(self) -> int:
        return self.pages.computed

    @property
    def left(self) -> int:
        """Tokens that can be computed now. An open prompt keeps its last token, for the logits at its end."""
        return self.sequence.length - self.pages.computed - (0 if self.sequence.request.sealed else 1)

    @property
    def decodes(self) -> bool:
        """Whether its next token is all that it needs, or comes from a forward that is not back yet.

        A sequence that has lost its pages resumes, even where the prefix cache has all but its last token.
        """
        return self.left <= 1 and bool(self.sequence.tokens) and not self.restarts

    @property
    def priority(self) -> int:
        return self.order[0]

    @property
    def samples(self) -> tuple[SequenceState, ...]:
        """The sequences that get a token at the end of its tokens."""
        return (self.sequence, *(fork for fork in self.forks if fork.finish_reason is None))

    @property
    def holds_something(self) -> bool:
        return any(self.pages.held) or self.slot != NO_SLOT

    def token_ids(self, start: int, stop: int) -> Sequence[int]:
        prompt, tokens = self.sequence.request.prompt, self.sequence.tokens
        known = len(prompt)
        if stop <= known:
            return prompt[start:stop]
        return [*prompt[start:], *tokens[max(0, start - known) : stop - known]]

    def look_up(self, tokens: int) -> None:
        gained = self.pages.look_up(tokens)
        if not self.began_anew:
            self.found += gained

    def cut(self, kept: int) -> None:
        """Keeps the computed ones of a prompt's first ``kept`` tokens, but leaves at least one token to compute."""
        self.pages.cut(min(kept, self.sequence.length - 1))
        self.found = min(self.found, self.pages.computed)
