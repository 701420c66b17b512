"""Drafts the next tokens of sequences from their own text, as many as verifying them is worth.

Knows nothing of schedulers or tensors. A draft is worth its time if its chance to be accepted, times what a token of
its sequence costs without drafts, is more than the time that a further token adds to a step. Both are measured while
the engine runs, so that it drafts nothing where acceptance does not pay: in prose, or beside many sequences. The chance
is measured for each size of the n-gram that was found, as the tokens after a longer one are right more often: in each
sequence, and in all sequences together, whose rate is the prior of a new sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.speculation.ngram_index import NgramIndex
from mlserver_torch_stream.engine.speculation.step_time import StepTime

_DECAY = 0.8  # of a sequence's counts, at each verification of its drafts
_DECAY_OF_ALL = 0.98  # of the counts of all sequences together, likewise
_DECAY_WITHOUT_DRAFT = 0.98  # of a sequence's counts, at each step in which no draft of it is worth its time
_DECAY_OF_REJECTIONS = 0.998  # of the rejections of all sequences, likewise, so that drafts are tried again some time
_PRIOR_WEIGHT = 2.0  # the rate of all sequences counts like so many verifications of one sequence
_MARGIN = 1.25  # a draft must save so many times the time that it costs


@dataclass(slots=True)
class _Counts:
    """Weighted counts of accepted and of rejected drafts."""

    accepted: float = 0.0
    rejected: float = 0.0

    def note(self, drafted: int, accepted: int, decay: float) -> None:
        self.accepted = decay * self.accepted + accepted
        self.rejected = decay * self.rejected + (accepted < drafted)

    def rate(self, prior: float = 0.0, weight: float = 0.0) -> float:
        return (self.accepted + prior * weight) / (self.accepted + self.rejected + weight)


@dataclass(slots=True)
class _Drafted:
    """A sequence's index, the size of the n-gram before its newest drafts, and its counts by that size."""

    index: NgramIndex = field(default_factory=NgramIndex)
    size: int = 0
    counts: dict[int, _Counts] = field(default_factory=lambda: defaultdict(_Counts))


class PromptLookup:
    """Drafts at most ``most`` tokens for a sequence and a step. One thread calls all its methods."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._drafted: dict[SequenceState, _Drafted] = {}
        self._all: dict[int, _Counts] = defaultdict(lambda: _Counts(1.0, 1.0))  # of all sequences
        self._time = StepTime()

    def drafts(self, sequence: SequenceState, running: int) -> list[int]:
        """Returns the drafts of a sequence for a step in which ``running`` sequences decode."""
        if (state := self._drafted.get(sequence)) is None:
            state = self._drafted[sequence] = _Drafted()
        prompt, tokens = sequence.request.prompt, sequence.tokens
        known = len(state.index)
        state.index.extend([*prompt[known:], *tokens[max(0, known - len(prompt)) :]])
        state.size = size = state.index.matching
        room = sequence.request.max_tokens - len(tokens) - 1
        if not size or room <= 0:
            return []
        own, of_all = state.counts[size], self._all[size]
        most = min(self._worthwhile(own.rate(of_all.rate(), _PRIOR_WEIGHT), running), room)
        if not most:
            own.accepted *= _DECAY_WITHOUT_DRAFT
            own.rejected *= _DECAY_WITHOUT_DRAFT
            of_all.rejected *= _DECAY_OF_REJECTIONS
        return state.index.lookup(most)

    def _worthwhile(self, rate: float, running: int) -> int:
        """Returns how many drafts are worth their time: the j-th is accepted with a chance of ``rate ** j``."""
        value, cost = self._time.of(running) / running, self._time.per_token
        count = 0
        while count < self._most and rate ** (count + 1) * value >= _MARGIN * cost:
            count += 1
        return count

    def verified(self, sequence: SequenceState, drafted: int, accepted: int) -> None:
        """Notes how many drafts of a sequence were accepted: all, or those before the first wrong one."""
        if (state := self._drafted.get(sequence)) is not None:
            state.counts[state.size].note(drafted, accepted, _DECAY)
            self._all[state.size].note(drafted, accepted, _DECAY_OF_ALL)

    def stepped(self, tokens: int, seconds: float) -> None:
        """Notes how long a step without chunks of prompts took."""
        self._time.note(tokens, seconds)

    def forget(self, sequences: Iterable[SequenceState]) -> None:
        for sequence in sequences:
            self._drafted.pop(sequence, None)
