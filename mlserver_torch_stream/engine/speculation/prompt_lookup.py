"""Drafts the next tokens of sequences from their own text, as many as verifying them is worth.

Knows nothing of schedulers or tensors. A draft is worth its part of a step if its chance to be accepted, times what a
token of its sequence costs without drafts, is more than the time that a further token adds to a step. Both are measured
while the engine runs, so that it stops by itself where acceptance does not pay: in prose, or beside many sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.speculation.ngram_index import NgramIndex
from mlserver_torch_stream.engine.speculation.step_time import StepTime

_KEPT = 0.8  # of the weight of a sequence's earlier verifications
_FORGIVEN = 0.99  # of the weight of its rejections, for each token without drafts: it is tried again some time


@dataclass(slots=True)
class _Drafted:
    """A sequence's index, and its weighted counts of accepted and of rejected drafts."""

    index: NgramIndex = field(default_factory=NgramIndex)
    accepted: float = 1.0
    rejected: float = 1.0

    @property
    def rate(self) -> float:
        return self.accepted / (self.accepted + self.rejected)


class PromptLookup:
    """Drafts at most ``most`` tokens for a sequence and a step. One thread calls all its methods."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._drafted: dict[SequenceState, _Drafted] = {}
        self._time = StepTime()

    def drafts(self, sequence: SequenceState, running: int) -> list[int]:
        """Returns the drafts of a sequence beside which ``running - 1`` others decode."""
        state = self._drafted.setdefault(sequence, _Drafted())
        prompt, tokens = sequence.request.prompt, sequence.tokens
        known = len(state.index)
        state.index.extend([*prompt[known:], *tokens[max(0, known - len(prompt)) :]])
        most = min(self._worthwhile(state.rate, running), sequence.request.max_tokens - len(tokens) - 1)
        found = state.index.lookup(most) if most > 0 else []
        if not found:
            state.rejected *= _FORGIVEN
        return found

    def _worthwhile(self, rate: float, running: int) -> int:
        """Returns how many drafts are worth their time: the j-th is accepted with a chance of ``rate ** j``."""
        value, cost = self._time.of(running) / running, self._time.per_token
        count = 0
        while count < self._most and rate ** (count + 1) * value >= cost:
            count += 1
        return count

    def verified(self, sequence: SequenceState, drafted: int, accepted: int) -> None:
        """Notes how many drafts of a sequence were accepted: all, or those before the first wrong one."""
        if (state := self._drafted.get(sequence)) is not None:
            state.accepted = _KEPT * state.accepted + accepted
            state.rejected = _KEPT * state.rejected + (accepted < drafted)

    def stepped(self, tokens: int, seconds: float) -> None:
        """Notes how long a step without chunks of prompts took."""
        self._time.note(tokens, seconds)

    def forget(self, sequences: Iterable[SequenceState]) -> None:
        for sequence in sequences:
            self._drafted.pop(sequence, None)
