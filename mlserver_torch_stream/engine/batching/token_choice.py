"""Chooses the next tokens of all sequences of a step, and verifies drafts with the tokens that are chosen.

Knows nothing of pages, of text, nor of the order of forwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from mlserver_torch_stream.engine.batching.step_results import ComputedPart, StepResult
from mlserver_torch_stream.engine.client_messages import in_short
from mlserver_torch_stream.engine.constraints.token_matcher import TokenMatcher
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.sampling.sampler import SampledToken, sample
from mlserver_torch_stream.engine.sampling.sampler_factory import SamplerFactory
from mlserver_torch_stream.engine.scheduling.step_plan import ScheduledSequence, StepPlan
from mlserver_torch_stream.errors import GenerationFailed
from mlserver_torch_stream.types import FinishReason

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ChosenTokens:
    """What the sequences of a step have got: ``sequences`` are those that have new tokens.

    ``verified`` is how many tokens count of each part with drafts: all but the drafts that were not accepted. The
    logits of ``spoiled`` sequences hold NaN, and so may their pages: they have got no token, and have not ended.
    """

    verified: dict[ScheduledSequence, int]
    sequences: dict[SequenceState, int] = field(default_factory=dict)
    spoiled: dict[SequenceState, GenerationFailed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A sequence that gets its next token from a row of the logits, behind ``drafts`` accepted ones."""

    computed: ComputedPart
    sequence: SequenceState
    drafts: int = 0

    @property
    def row(self) -> int:
        return self.computed.row + self.drafts


class TokenChoice:
    """Samples the rows of all sequences at once. If that raises, it samples each sequence's rows alone.

    So only the sequence at fault ends in an error. Tokens that a constraint forces are not sampled, unless their
    log-probabilities are wanted.

    A draft is accepted where it equals the token that is sampled from the row before it. The noise of sampling depends
    on the position and the token alone, so the tokens are those that the sequence gets without drafts.
    """

    def __init__(self, samplers: SamplerFactory, check_devices: Callable[[], None]) -> None:
        self._samplers = samplers
        self._check_devices = check_devices
        self._mask_worker = ThreadPoolExecutor(1, "token-masks")  # its thread ends with it

    def choose(self, result: StepResult) -> ChosenTokens:
        """Gives the unfinished sequences of a step their tokens."""
        parts = [computed.part for computed in result.computed]
        chosen = ChosenTokens({part: part.count - len(part.drafts) for part in parts if part.drafts})
        turns = [
            _Turn(computed, sequence)
            for computed in result.computed
            if not computed.part.samples or self._begin(computed.part.sequence.request)
            for sequence in computed.part.samples
            if not sequence.ended
        ]
        while turns := [open_turn for turn in turns if (open_turn := _take_forced(turn, chosen))]:
            choices = self._sample(result.logits, turns)
            turns = [
                again for turn, choice in zip(turns, choices, strict=True) if (again := _take(turn, choice, chosen))
            ]
        return chosen

    def prepare(self, plan: StepPlan) -> None:
        """Starts what can be computed while the forward of a plan runs: which tokens the constraints allow."""
        matchers = [
            matcher
            for part in plan.scheduled
            for sequence in part.samples
            if (matcher := sequence.matcher) is not None and len(matcher.forced) <= len(part.drafts)
        ]
        TokenMatcher.start_masks(matchers, self._mask_worker)

    def _begin(self, request: RequestState) -> bool:
        """Makes the samplers of a request whose prompt is computed. Returns False if its parameters allow none."""
        if request.sequences[0].sampler is not None:
            return True
        try:
            self._samplers.begin(request)
        except Exception as error:
            logger.exception("the samplers of a request could not be made")
            request.finish(FinishReason.ERROR, GenerationFailed(f"prefill failed: {in_short(error)}"))
            return False
        return True

    def _sample(self, logits: torch.Tensor, turns: Sequence[_Turn]) -> list[SampledToken | GenerationFailed]:
        rows = [turn.row for turn in turns]
        samplers = [turn.sequence.sampler for turn in turns if turn.sequence.sampler is not None]
        try:
            return sample(logits, samplers, rows)
        except Exception as error:
            if len(turns) > 1:
                return [self._sample(logits, [turn])[0] for turn in turns]
            if isinstance(error, GenerationFailed):  # a constraint of the sequence: its text is for the client
                return [error]
            logger.exception("sampling failed")
            self._check_devices()
            return [GenerationFailed(f"sampling failed: {in_short(error)}")]


def _take_forced(turn: _Turn, chosen: ChosenTokens) -> _Turn | None:
    """Gives a sequence the tokens that are forced. Returns the turn behind them, if there is one."""
    sampler, following = turn.sequence.sampler, turn
    assert sampler is not None
    while (token_id := sampler.only_token) is not None:
        taken = _take(following, SampledToken(token_id), chosen)
        if taken is None:
            return None
        following = taken
    return following


def _take(turn: _Turn, choice: SampledToken | GenerationFailed, chosen: ChosenTokens) -> _Turn | None:
    """Gives a sequence its token. Returns its next turn if the token was drafted, and the sequence goes on."""
    sequence = turn.sequence
    if isinstance(choice, GenerationFailed):
        chosen.spoiled[sequence] = choice
        return None
    chosen.sequences.setdefault(sequence, len(sequence.tokens))
    assert sequence.sampler is not None
    try:
        sequence.sampler.accept(choice.token_id)
        sequence.accept(choice.token_id, choice.logprob)
    except GenerationFailed as error:
        sequence.finish(FinishReason.ERROR, error)
    except Exception as error:
        logger.exception("a token could not be taken")
        sequence.finish(FinishReason.ERROR, GenerationFailed(f"token {choice.token_id} failed: {in_short(error)}"))
    drafts = turn.computed.part.drafts
    if turn.drafts == len(drafts) or choice.token_id != drafts[turn.drafts]:
        return None
    chosen.verified[turn.computed.part] += 1
    return replace(turn, drafts=turn.drafts + 1) if not sequence.ended else None
