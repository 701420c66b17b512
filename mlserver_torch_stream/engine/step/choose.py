"""Chooses the next tokens of a step's sequences, and records which parts of the step were computed.

The next tokens of all sequences are chosen together. A draft is right if it equals the chosen token. If the forward
pass of all sequences raises an error, halves of the batch run again until each failing sequence is known. Running a
sequence twice is safe, because it writes the same keys and values to the same pages. The batch's page copies are not
repeated, because another sequence may have overwritten a source page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from mlserver_torch_stream.engine.cache.pages import Batch
from mlserver_torch_stream.engine.failures import drop_tracebacks, log_failure
from mlserver_torch_stream.engine.forward.interface import Logits
from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.sampling.row_sampler import RowSampler
from mlserver_torch_stream.engine.sampling.sampler import NOT_FINITE, SampledToken, SamplerFactory, sample
from mlserver_torch_stream.engine.scheduler.ledger import StepPart
from mlserver_torch_stream.engine.scheduler.scheduler import StepPlan
from mlserver_torch_stream.errors import GenerationFailed
from mlserver_torch_stream.types import FinishReason, TokenLogprob


@dataclass(eq=False, slots=True)
class _LogitsRow:
    """The row of logits from which a sequence samples its next token, after ``accepted`` of its drafts."""

    part: StepPart
    sequence: SequenceState
    sampler: RowSampler
    index: int
    accepted: int = 0


@dataclass(eq=False, slots=True)
class StepResult:
    """The result of a step: which parts were computed, their ``logits``, and which sequences got tokens.

    ``rows`` maps each computed part to the first of its rows in the logits; ``failures`` maps each failed part to its
    error. ``tokens_before`` maps each sequence with new tokens to its number of tokens before the step. ``verified``
    maps each part with drafts to the number of its tokens without the rejected drafts. ``spoiled`` sequences have NaN
    in a row of logits, and perhaps in their pages. They get no token from that row, but have not ended.
    """

    rows: dict[StepPart, int]
    logits: Logits
    failures: dict[StepPart, Exception] = field(default_factory=dict)
    verified: dict[StepPart, int] = field(default_factory=dict)
    tokens_before: dict[SequenceState, int] = field(default_factory=dict)
    spoiled: dict[SequenceState, GenerationFailed] = field(default_factory=dict)

    def drop(self, sequences: Collection[SequenceState]) -> None:
        """Removes the parts of these sequences from the result."""
        for part in [part for part in self.rows if part.sequence in sequences] if sequences else ():
            del self.rows[part]

    def take_forced(self, row: _LogitsRow) -> bool:
        """Appends to the sequence the tokens that its constraint forces.

        Returns whether the row must then be sampled.
        """
        while True:
            try:
                token_id = row.sampler.only_token
            except Exception as error:
                row.sequence.finish(FinishReason.ERROR, log_failure("sampling", error))
                return False
            if token_id is None:
                return True
            if not self.take(row, SampledToken(token_id)):
                return False

    def take(self, row: _LogitsRow, choice: SampledToken | GenerationFailed) -> bool:
        """Appends the chosen token to the row's sequence. If the token was drafted, ``row`` moves to the next logits.

        Returns whether another token must be chosen, because the row has moved and the sequence has not ended.
        """
        sequence, part = row.sequence, row.part
        if isinstance(choice, GenerationFailed):
            self.spoiled[sequence] = choice
            return False
        self.tokens_before.setdefault(sequence, len(sequence.tokens))
        try:
            row.sampler.accept(choice.token_id)
            sequence.accept(choice.token_id, choice.logprob)
        except Exception as error:
            sequence.finish(FinishReason.ERROR, log_failure(f"token {choice.token_id}", error))
        if row.accepted == len(part.drafts) or choice.token_id != part.drafts[row.accepted]:
            return False
        self.verified[part] += 1
        row.accepted += 1
        row.index += 1
        return not sequence.ended


def no_result() -> StepResult:
    """Returns the result of a step in which no sequence was computed."""
    return StepResult({}, Logits(torch.empty(0)))


def whole_result(plan: StepPlan, logits: Logits) -> StepResult:
    """Returns the result of a step whose forward computed all parts of the plan.

    ``logits`` are [wanted tokens, vocab].
    """
    return StepResult(_rows(plan.parts), logits)


def in_halves(
    plan: StepPlan, void: Collection[SequenceState], run: Callable[[Batch], Logits], error: Exception
) -> StepResult:
    """Runs the parts of a plan again after its forward raised ``error``. Leaves out the parts of ``void`` sequences.

    Each half of the parts runs separately; if a half raises an error, it is halved again. A part has failed if it
    raises an error when it runs alone. If only the batch as a whole fails, for example for lack of memory, no part
    fails. A plan of one part is not run again.
    """
    result = no_result()
    if len(plan.parts) == 1:
        result.failures = dict.fromkeys(plan.parts, error)
        return result
    computed: list[StepPart] = []
    logits: list[torch.Tensor] = []
    pending = _halves([part for part in plan.parts if part.sequence not in void])
    while pending:
        parts = pending.pop()
        try:
            rows = run(Batch(tuple([part.input for part in parts]))).tensor
            logits.append(rows.clone())  # the next call may overwrite them
            computed += parts
        except Exception as failure:
            drop_tracebacks(failure)
            if len(parts) == 1:
                result.failures[parts[0]] = failure
            else:
                pending += _halves(parts)
    if logits:
        result.rows, result.logits = _rows(computed), Logits(torch.cat(logits))
    return result


def _halves(parts: list[StepPart]) -> list[list[StepPart]]:
    """Returns the second and the first half of ``parts``, in this order, without empty halves."""
    middle = len(parts) // 2
    return [half for half in (parts[middle:], parts[:middle]) if half]


def _rows(parts: Sequence[StepPart]) -> dict[StepPart, int]:
    """Returns the index of each part's first row in the logits of all parts."""
    rows, row = {}, 0
    for part in parts:
        rows[part] = row
        row += part.input.wanted
    return rows


class TokenChoice:
    """Samples the rows of all sequences at once.

    If that raises an error, each row is sampled separately, so that only the sequence at fault ends with an error.
    Tokens that a constraint forces are not sampled, unless their log-probabilities are wanted. A draft is accepted if
    it equals the token that is sampled from the preceding row. The sampling noise depends only on the position and the
    token, so a sequence gets the same tokens as without drafts.
    """

    def __init__(self, samplers: SamplerFactory, check_devices: Callable[[], None]) -> None:
        self._samplers = samplers
        self._check_devices = check_devices

    def choose(self, result: StepResult) -> None:
        """Chooses the next tokens of the unfinished sequences of a step, and appends them."""
        rows: list[_LogitsRow] = []
        for part, first_row in result.rows.items():
            if part.drafts:
                result.verified[part] = part.count - len(part.drafts)
            for sequence in part.samples:
                if not sequence.ended and (sampler := sequence.sampler or self._made_sampler(sequence)):
                    rows.append(_LogitsRow(part, sequence, sampler, first_row + part.sampled_row))
        while rows := [row for row in rows if row.sampler.matcher is None or result.take_forced(row)]:
            choices = self._sample(result.logits, rows)
            rows = [row for row, choice in zip(rows, choices, strict=True) if result.take(row, choice)]

    def score(self, result: StepResult) -> dict[StepPart, list[TokenLogprob]]:
        """Returns the scores of the prompts whose logits this step computed.

        NaN in a prompt's logits spoils its sequences.
        """
        scored: dict[StepPart, list[TokenLogprob]] = {}
        for part, row in result.rows.items():
            request = part.sequence.request
            if not request.rows_to_score(part.start, part.start + part.count):
                continue
            first = part.start + part.count - part.input.wanted + 1  # the token that the first row scores
            token_ids = request.prompt[first : part.start + part.count + 1]
            scores = self._samplers.scores(result.logits.tensor[row : row + len(token_ids)], token_ids, request.params)
            if all(math.isfinite(score.logprob or 0.0) or score.logprob == -math.inf for score in scores):
                scored[part] = scores
            else:
                result.spoiled.update(dict.fromkeys(request.sequences, GenerationFailed(NOT_FINITE)))
        result.drop(result.spoiled)
        return scored

    def _made_sampler(self, sequence: SequenceState) -> RowSampler | None:
        """Makes the samplers of a sequence's request, and returns the sequence's own; None if that fails."""
        try:
            self._samplers.begin(sequence.request)
        except Exception as error:
            sequence.request.finish(FinishReason.ERROR, log_failure("prefill", error))
            return None
        return sequence.sampler

    def _sample(self, logits: Logits, rows: Sequence[_LogitsRow]) -> list[SampledToken | GenerationFailed]:
        try:
            indices = [row.index for row in rows]
            return sample(logits.tensor, [row.sampler for row in rows], indices, logits.argmax, logits.row_draw)
        except Exception as error:
            if len(rows) > 1:
                return [self._sample(logits, [row])[0] for row in rows]
            failure = log_failure("sampling", error)
            self._check_devices()
            return [failure]
