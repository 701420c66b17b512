"""Drafts the next tokens of sequences: tokens that a constraint forces, or tokens looked up in the sequence itself.

On average, a draft saves the product of its probability of acceptance and the time of a token without drafts. The draft
is worthwhile if this product exceeds the time that one more token adds to a step. Probabilities and times are measured
while the engine runs, so there are no drafts where they would cost time, for example in prose or with many sequences.
The acceptance rate is measured separately for each size of the n-gram that was found. It is measured per sequence and
over all sequences; the rate over all sequences is the prior for a new sequence.

The method is prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.step.step_cost import StepCost

# Longer n-grams first: their continuations are right more often.
_SIZES = (4, 3, 2)
_WINDOW = 8192  # tokens: an index of them takes about 4 MB


class NgramIndex:
    """Maps each n-gram of the last ``window`` tokens of a sequence to the position after its last occurrence.

    The n-gram at the end of the sequence is not an occurrence.
    """

    def __init__(self, window: int = _WINDOW) -> None:
        self._window = window
        self._tokens: list[int] = []  # the newest tokens, at least ``window`` of them
        self._first = 0  # the position of the first token in ``_tokens``
        self._after: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        """Returns the length of the sequence, including the tokens before the window."""
        return self._first + len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds the newest tokens of the sequence, and forgets the tokens that leave the window."""
        if len(tokens) > self._window:
            self._first = len(self) + len(tokens) - self._window
            self._tokens.clear()
            self._after.clear()
            tokens = tokens[-self._window :]
        for token in tokens:
            end = len(self._tokens)
            for size in _SIZES:
                if end >= size:
                    self._after[tuple(self._tokens[end - size :])] = self._first + end
            self._tokens.append(token)
            if end >= self._window:
                self._forget(end - self._window)
        if len(self._tokens) >= 2 * self._window:
            self._first += len(self._tokens) - self._window
            del self._tokens[: -self._window]

    def _forget(self, index: int) -> None:
        """Forgets the n-grams that begin at this index of the tokens, unless they have occurred again."""
        for size in _SIZES:
            ngram = tuple(self._tokens[index : index + size])
            if self._after.get(ngram) == self._first + index + size:
                del self._after[ngram]

    @property
    def matching(self) -> int:
        """The length of the longest n-gram at the sequence's end that occurred earlier; 0 means that there is none."""
        return self._find()[0]

    def lookup(self, most: int) -> list[int]:
        """Returns at most ``most`` tokens that may come next; none if the newest tokens did not occur before."""
        size, position = self._find()
        drafts: list[int] = []
        for index in range(position, position + most) if size else ():  # if the text repeats itself, so do the drafts
            known = len(self)
            drafts.append(self._tokens[index - self._first] if index < known else drafts[index - known])
        return drafts

    def _find(self) -> tuple[int, int]:
        """Returns ``matching``, and the position after the n-gram's last earlier occurrence; zeros if there is none."""
        for size in _SIZES:
            newest = tuple(self._tokens[-size:])
            if len(newest) == size and newest in self._after:
                return size, self._after[newest]
        return 0, 0


_DECAY = 0.8  # the factor for a sequence's counts at each verification of its drafts
_DECAY_OF_ALL = 0.98  # the factor for the counts of all sequences together, at the same moment
_DECAY_WITHOUT_DRAFT = 0.98  # the factor at each step in which none of the sequence's drafts is worthwhile
# The factor for the rejections of all sequences at each step without a worthwhile draft, so that drafts are tried
# again.
_DECAY_OF_REJECTIONS = 0.998
_PRIOR_WEIGHT = 2.0  # the rate of all sequences weighs as much as this many verifications of one sequence
_MARGIN = 1.25  # how many times its own cost a draft must save


@dataclass(slots=True)
class _Counts:
    """Weighted counts of accepted and rejected drafts."""

    accepted: float = 0.0
    rejected: float = 0.0

    def note(self, drafted: int, accepted: int, decay: float) -> None:
        self.accepted = decay * self.accepted + accepted
        self.rejected = decay * self.rejected + (accepted < drafted)

    def rate(self, prior: float = 0.0, weight: float = 0.0) -> float:
        return (self.accepted + prior * weight) / (self.accepted + self.rejected + weight)


@dataclass(slots=True)
class _Drafted:
    """A sequence's n-gram index, the size of the n-gram behind its newest drafts, and its counts for each size."""

    index: NgramIndex = field(default_factory=NgramIndex)
    size: int = 0
    counts: dict[int, _Counts] = field(default_factory=lambda: defaultdict(_Counts))


class PromptLookup:
    """Drafts at most ``most`` tokens per sequence and step by prompt lookup. One thread calls all its methods.

    The batcher records the times of its steps in ``cost``.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._drafted: dict[SequenceState, _Drafted] = {}
        self._all: dict[int, _Counts] = defaultdict(lambda: _Counts(1.0, 1.0))  # the counts of all sequences together
        self.cost = StepCost()

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
        """Returns how many drafts are worthwhile, if the j-th is accepted with probability ``rate ** j``."""
        value, cost = self.cost.of(running) / running, self.cost.per_row
        count = 0
        while count < self._most and rate ** (count + 1) * value >= _MARGIN * cost:
            count += 1
        return count

    def verified(self, sequence: SequenceState, drafted: int, accepted: int) -> None:
        """Records how many drafts of a sequence were accepted: all drafts, or those before the first wrong draft."""
        if (state := self._drafted.get(sequence)) is not None:
            state.counts[state.size].note(drafted, accepted, _DECAY)
            self._all[state.size].note(drafted, accepted, _DECAY_OF_ALL)

    def forget(self, sequences: Iterable[SequenceState]) -> None:
        for sequence in sequences:
            self._drafted.pop(sequence, None)


class Drafter:
    """Makes the drafts of all sequences. One thread calls its methods.

    With ``forced``, the tokens that a constraint forces are drafted; with a ``lookup``, also the tokens that ``lookup``
    finds. A forced token is always accepted and saves its sequence a step, so its acceptance is not measured.
    """

    def __init__(self, lookup: PromptLookup | None, forced: bool) -> None:
        self._lookup = lookup
        self._drafts_forced = forced
        self._forced: set[SequenceState] = set()  # sequences whose newest drafts were forced

    def drafts(self, sequence: SequenceState, running: int) -> Sequence[int]:
        """Returns the drafts of a sequence for a step in which ``running`` sequences decode."""
        if self._lookup is None and sequence.request.input.constraint is None:
            return ()
        matcher = sequence.matcher
        if matcher is not None and matcher.forced and self._drafts_forced:
            self._forced.add(sequence)
            return tuple(matcher.forced)
        self._forced.discard(sequence)
        drafts = () if self._lookup is None else self._lookup.drafts(sequence, running)
        return drafts if matcher is None or not drafts else matcher.prefix(drafts)

    def verified(self, sequence: SequenceState, drafted: int, accepted: int) -> bool:
        """Records how many drafts of a sequence were accepted.

        Returns False if the sequence's constraint had forced the drafts.
        """
        if sequence in self._forced:
            return False
        if self._lookup is not None:
            self._lookup.verified(sequence, drafted, accepted)
        return True

    def forget(self, sequences: Sequence[SequenceState]) -> None:
        self._forced.difference_update(sequences)
        if self._lookup is not None:
            self._lookup.forget(sequences)
