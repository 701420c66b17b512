"""Drafts the tokens that a constraint forces, or else those that prompt lookup finds and the constraint allows.

Knows nothing of schedulers or tensors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from mlserver_torch_stream.engine.batch import Batch
from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.speculation.prompt_lookup import PromptLookup


class Drafter:
    """Makes the drafts of all sequences. One thread calls its methods.

    Without a ``lookup`` only forced tokens are drafted. With ``forced``, tokens that a constraint forces are drafted:
    each of them is accepted and saves its sequence a step, so that their worth is not measured.
    """

    def __init__(self, lookup: PromptLookup | None, forced: bool) -> None:
        self._lookup = lookup
        self._drafts_forced = forced
        self._forced: set[SequenceState] = set()  # sequences whose newest drafts were forced

    def drafts(self, sequence: SequenceState, running: int) -> Sequence[int]:
        """Returns the drafts of a sequence for a step in which ``running`` sequences decode."""
        if self._lookup is None and sequence.request.constraint is None:
            return ()
        matcher = sequence.matcher
        if matcher is not None and matcher.forced and self._drafts_forced:
            self._forced.add(sequence)
            return tuple(matcher.forced)
        self._forced.discard(sequence)
        found = () if self._lookup is None else self._lookup.drafts(sequence, running)
        return found if matcher is None or not found else matcher.prefix(found)

    def verified(self, sequence: SequenceState, drafted: int, accepted: int) -> bool:
        """Notes how many drafts of a sequence were accepted. Returns False if its constraint had forced them."""
        if sequence in self._forced:
            return False
        if self._lookup is not None:
            self._lookup.verified(sequence, drafted, accepted)
        return True

    def stepped(self, batch: Batch, began: float) -> None:
        """Notes how long a step without chunks of prompts took, which began at this time and has just ended."""
        if self._lookup is not None:
            self._lookup.stepped(batch.tokens, time.monotonic() - began)

    def forget(self, sequences: Sequence[SequenceState]) -> None:
        self._forced.difference_update(sequences)
        if self._lookup is not None:
            self._lookup.forget(sequences)
