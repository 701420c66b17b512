"""Bias, penalties, bad words and minimum length change the logits as transformers or OpenAI define them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from mlserver_torch_stream.engine.sampling.row_sampler import LogitAdjuster, adjust_rows
from mlserver_torch_stream.types import SamplingParameters

_VOCAB = 300
_PROMPT = [5, 6, 7, 5, 250, 299]


def _adjuster(
    sequence: list[int] | None = None, bad_words: Any = (), end_ids: tuple[int, ...] = (2, 9), **params: Any
) -> LogitAdjuster:
    adjuster = LogitAdjuster(
        SamplingParameters(**params), prompt_ids=_PROMPT, vocab_size=_VOCAB, end_ids=end_ids, bad_words_ids=bad_words
    )
    for token_id in sequence or []:
        adjuster.accept(token_id)
    return adjuster


def _logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(_VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def _adjusted(adjuster: LogitAdjuster, logits: torch.Tensor) -> torch.Tensor:
    row = logits.clone()
    if (edits := adjuster.edits()) is not None:
        adjust_rows(row[None], [0], [edits])
    return row


def test_nothing_asked_is_nothing_done() -> None:
    assert _adjuster([1, 2, 3]).edits() is None


@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
@pytest.mark.parametrize("length", [0, 1, 700])
def test_repetition_penalty_is_transformers(penalty: float, length: int) -> None:
    rng = random.Random(length)
    sequence = [rng.randrange(_VOCAB) for _ in range(length)]
    ours = _adjusted(_adjuster(sequence, repetition_penalty=penalty), _logits())
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([_PROMPT + sequence]), _logits()[None])[0]
    torch.testing.assert_close(ours, theirs)


def test_presence_and_frequency_penalties_count_the_answer_only() -> None:
    sequence = [5, 5, 8]
    ours = _adjusted(_adjuster(sequence, presence_penalty=0.5, frequency_penalty=0.25), _logits())
    expected = _logits()
    expected[5] -= 0.5 + 2 * 0.25
    expected[8] -= 0.5 + 0.25
    torch.testing.assert_close(ours, expected)


def test_logit_bias_is_added_before_the_repetition_penalty_as_transformers_does() -> None:
    bias = {5: 4.0, 100: -100.0}
    ours = _adjusted(_adjuster(logit_bias=bias, repetition_penalty=1.5), _logits())
    ids = torch.tensor([_PROMPT])
    biased = SequenceBiasLogitsProcessor({(token_id,): value for token_id, value in bias.items()})(ids, _logits()[None])
    torch.testing.assert_close(ours, RepetitionPenaltyLogitsProcessor(1.5)(ids, biased)[0])


def test_the_end_is_suppressed_until_min_tokens_are_there() -> None:
    adjuster = _adjuster(min_tokens=3, end_ids=(2, 9))
    for count in range(5):
        theirs = MinNewTokensLengthLogitsProcessor(len(_PROMPT), 3, [2, 9])(
            torch.zeros((1, len(_PROMPT) + count), dtype=torch.int64), _logits()[None]
        )[0]
        assert (adjuster.edits() is not None) == (count < 3)
        assert torch.equal(_adjusted(adjuster, _logits()), theirs)
        adjuster.accept(1)


def test_bad_words_are_transformers() -> None:
    rng = random.Random(2)
    words = [[3], [4, 5], [5, 4], [4, 4, 4], [5, 6, 7, 3], [9], [9, 3], [299, 4]]
    theirs = NoBadWordsLogitsProcessor(words, [2, 9])
    sequence: list[int] = []
    adjuster = _adjuster(bad_words=words)
    for _ in range(200):
        expected = theirs(torch.tensor([_PROMPT + sequence]), _logits()[None])[0]
        assert torch.equal(_adjusted(adjuster, _logits()), expected)
        sequence.append(rng.choice([4, 5, 6, 7, 9]))
        adjuster.accept(sequence[-1])


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    adjuster = _adjuster(
        [9999], [[9999], [5, 9999]], (9999,), logit_bias={9999: 1.0}, repetition_penalty=1.2, min_tokens=2
    )
    assert bool(_adjusted(adjuster, _logits()).isfinite().all())


_ALL_KINDS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"logit_bias": {5: 2.0, 9: -3.0}},
    {"min_tokens": 20, "repetition_penalty": 0.8, "logit_bias": {6: 1.0}},
]


def test_rows_are_adjusted_together_as_each_is_alone() -> None:
    adjusters = [_adjuster([1, 2, 2, 7], [(3,)], **params) for params in _ALL_KINDS]
    work = torch.stack([_logits(seed) for seed in range(6)])
    expected = [_adjusted(adjuster, work[row]) for row, adjuster in zip((0, 2, 3, 5), adjusters, strict=True)]
    untouched = work[[1, 4]].clone()
    adjust_rows(work, [0, 2, 3, 5], [adjuster.edits() for adjuster in adjusters])
    assert torch.equal(work[[0, 2, 3, 5]], torch.stack(expected))
    assert torch.equal(work[[1, 4]], untouched)


def test_more_rows_need_no_more_operations() -> None:
    """On a GPU, each operation is a kernel launch, and each copy would wait for the device."""

    class Count(TorchDispatchMode):  # type: ignore[misc]
        operations = 0

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.operations += 1
            return operation(*args, **(kwargs or {}))

    def operations(copies: int) -> int:
        edits = [_adjuster([1, 2], [(3,)], **params).edits() for params in _ALL_KINDS * copies]
        work = torch.zeros(len(edits), _VOCAB)
        with Count() as count:
            adjust_rows(work, range(len(edits)), edits)
        return count.operations

    assert operations(16) == operations(1)
