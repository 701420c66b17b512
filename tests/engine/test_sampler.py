"""Tokens are drawn from the same distribution as in transformers, and each row as if it were alone."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from mlserver_torch_stream.engine.constraints.constraint_compiler import ConstraintCompiler
from mlserver_torch_stream.engine.constraints.token_matcher import TokenMatcher
from mlserver_torch_stream.engine.sampling import candidates
from mlserver_torch_stream.engine.sampling.row_sampler import FEW, LogitAdjuster, RowSampler
from mlserver_torch_stream.engine.sampling.sampler import SampledToken, sample
from mlserver_torch_stream.errors import GenerationFailed
from mlserver_torch_stream.types import Constraint, ConstraintKind, SamplingParameters
from tests.engine.tiny import byte_tokenizer

_SETTINGS: list[dict[str, float]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 5},
    {"temperature": 0.8, "top_k": 50},
    {"temperature": 1.0, "top_k": 127},
    {"temperature": 1.0, "top_k": 128},
    {"temperature": 1.0, "top_k": 400},
    {"temperature": 1.0, "top_k": 1100},
    {"temperature": 1.0, "top_k": 5000},
    {"temperature": 1.0, "top_p": 0.3},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.99},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 0.001},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.9, "typical_p": 0.5},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 300, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.6},
    {"temperature": 1.2, "top_p": 0.9, "typical_p": 0.7},
]

# One of each filter, and all of them together: to draw thousands of tokens takes longer than to compare the kept sets.
_FEW: list[dict[str, float]] = [
    {"temperature": 0.6},
    {"temperature": 0.8, "top_k": 50},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "typical_p": 0.5},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.6},
]


def _row(
    *,
    seed: int = 0,
    vocab_size: int = 1500,
    sample_index: int = 0,
    end_ids: tuple[int, ...] = (2,),
    matcher: TokenMatcher | None = None,
    **params: Any,
) -> RowSampler:
    given = SamplingParameters(**params)
    adjuster = LogitAdjuster(given, prompt_ids=(1, 2, 3), vocab_size=vocab_size, end_ids=end_ids, matcher=matcher)
    return RowSampler(given, adjuster, vocab_size, seed, sample_index)


def _logits(rows: int, vocab_size: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def _ids(choices: list[SampledToken | GenerationFailed]) -> list[int]:
    assert all(isinstance(choice, SampledToken) for choice in choices)
    return [choice.token_id for choice in choices if isinstance(choice, SampledToken)]


def _warped(logits: torch.Tensor, setting: dict[str, Any]) -> torch.Tensor:
    """The logits from which transformers' ``generate`` would draw, [V]; -inf for filtered tokens."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(setting["temperature"])])
    if "top_k" in setting:
        warpers.append(TopKLogitsWarper(setting["top_k"]))
    if "top_p" in setting:
        warpers.append(TopPLogitsWarper(setting["top_p"]))
    if "min_p" in setting:
        warpers.append(MinPLogitsWarper(setting["min_p"]))
    if "typical_p" in setting:
        warpers.append(TypicalLogitsWarper(setting["typical_p"]))
    return warpers(None, logits[None].float())[0]


class _Wish:
    """A row whose noise makes it choose the token id ``noise_key``, unless the filters remove it."""

    def __init__(self, token_id: int, setting: dict[str, Any]) -> None:
        self.noise_key = token_id
        self.temperature = setting["temperature"]
        self.top_k = int(setting.get("top_k", 0)) % 5000
        self.top_p = setting.get("top_p", 1.0)
        self.min_p = setting.get("min_p", 0.0)
        self.typical_p = setting.get("typical_p", 1.0)


def _around_the_edges(logits: torch.Tensor, kept: set[int]) -> list[int]:
    """The ids near each boundary between kept and filtered ranks, and every ninth; testing all takes seconds."""
    ranked = logits.argsort(descending=True).tolist()
    edges = [rank for rank in range(1, len(ranked)) if (ranked[rank] in kept) != (ranked[rank - 1] in kept)]
    near = {rank + step for rank in edges for step in range(-12, 12)} | set(range(0, len(ranked), 9))
    return [ranked[rank] for rank in sorted(near) if 0 <= rank < len(ranked)]


@pytest.mark.parametrize("setting", _SETTINGS, ids=str)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_the_kept_set_is_transformers(setting: dict[str, Any], spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        candidates, "gumbel", lambda keys, ids: torch.where(torch.tensor(keys)[:, None] == ids, 1e9, 0.0)
    )
    logits = _logits(1, 1500, seed=3, spread=spread)
    expected = set(_warped(logits[0], setting).isfinite().nonzero()[:, 0].tolist())
    asked = _around_the_edges(logits[0], expected)
    drawn = candidates.draw(logits.expand(len(asked), -1), [_Wish(token_id, setting) for token_id in asked])
    kept = {token_id for token_id, chosen in zip(asked, drawn, strict=True) if token_id == chosen}
    unfiltered = set(setting) == {"temperature"} or setting.get("top_k") == 5000
    # The tail is one choice until it wins, so an unfiltered row can be asked for ids of its head only.
    best = set(logits[0].topk(127).indices.tolist()) if unfiltered else set(asked)
    assert kept & best == expected & best & set(asked)


@pytest.mark.parametrize(
    "setting", [each if each in _FEW else pytest.param(each, marks=pytest.mark.long) for each in _SETTINGS], ids=str
)
def test_frequencies_are_transformers(setting: dict[str, Any]) -> None:
    draws, vocab_size = 2000, 1200
    logits = _logits(1, vocab_size, seed=5, spread=2.0)[0]
    rows = [_row(seed=seed, vocab_size=vocab_size, **setting) for seed in range(draws, 2 * draws)]
    counts = torch.zeros(vocab_size)
    for start in range(0, draws, 500):
        part = rows[start : start + 500]
        for token_id in _ids(sample(logits.expand(len(part), -1), part)):
            counts[token_id] += 1
    expected = _warped(logits, setting).softmax(-1) * draws
    assert not bool(counts[expected == 0].any())
    common = expected >= 5
    seen = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    if float(wanted[-1]) < 1e-3:
        seen, wanted = seen[:-1], wanted[:-1]
    freedom = max(1, len(wanted) - 1)
    assert float(((seen - wanted) ** 2 / wanted).sum()) < freedom + 5 * math.sqrt(2 * freedom)


def test_values_tied_at_a_boundary_are_all_kept() -> None:
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0, 0.0]])
    rows = [_row(seed=seed, vocab_size=6, temperature=5.0, top_k=2) for seed in range(200)]
    assert set(_ids(sample(logits.expand(200, -1), rows))) == {0, 1, 2, 3}
    flat = torch.zeros(1, 1500)
    flat[0, 7] = 1.0
    rows = [_row(seed=seed, temperature=1.0, top_k=2) for seed in range(300)]
    assert len(set(_ids(sample(flat.expand(300, -1), rows)))) > 200


def _random_setting(rng: random.Random) -> dict[str, Any]:
    setting: dict[str, Any] = dict(rng.choice(_SETTINGS)) if rng.random() < 0.8 else {}
    if rng.random() < 0.3:
        setting |= {"repetition_penalty": 1.3, "presence_penalty": 0.2}
    if rng.random() < 0.2:
        setting |= {"logit_bias": {4: 3.0, 8: -100.0}, "min_tokens": 2}
    if rng.random() < 0.3:
        setting |= {"logprobs": True, "top_logprobs": rng.randrange(4)}
    return setting


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_sampled_in_any_batch_as_alone(dtype: torch.dtype) -> None:
    rng = random.Random(11)
    for batch in range(12):
        settings = [_random_setting(rng) for _ in range(rng.randrange(2, 20))]
        logits = _logits(len(settings), 3000, seed=batch, spread=rng.choice([0.5, 2.0, 4.0])).to(dtype)
        together = [_row(seed=i, vocab_size=2900, **setting) for i, setting in enumerate(settings)]
        alone = [_row(seed=i, vocab_size=2900, **setting) for i, setting in enumerate(settings)]
        for _ in range(3):
            choices = sample(logits, together)
            singles = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(alone)]
            assert _ids(choices) == _ids(singles)
            for first, second, a, b in zip(together, alone, choices, singles, strict=True):
                assert isinstance(a, SampledToken) and isinstance(b, SampledToken)
                _assert_same_logprob(a, b)
                first.accept(a.token_id)
                second.accept(b.token_id)


def _assert_same_logprob(a: SampledToken, b: SampledToken) -> None:
    if a.logprob is None or b.logprob is None:
        assert a.logprob is b.logprob
        return
    assert a.logprob.logprob == pytest.approx(b.logprob.logprob, abs=1e-5)
    assert [value for _, value in a.logprob.top] == pytest.approx([value for _, value in b.logprob.top], abs=1e-5)


def test_the_seed_decides() -> None:
    def text(seed: int, sample_index: int) -> list[int]:
        row = _row(seed=seed, sample_index=sample_index, temperature=1.0)
        ids = []
        for position in range(20):
            [token_id] = _ids(sample(_logits(1, 1500, seed=position), [row]))
            row.accept(token_id)
            ids.append(token_id)
        return ids

    assert text(1, 0) == text(1, 0)
    assert len({tuple(text(seed, index)) for seed in (-1, 0, 1, 2**40) for index in (0, 1)}) == 8


def test_each_position_has_its_own_noise() -> None:
    row, logits, ids = _row(temperature=1.0), _logits(1, 1500, spread=0.1), set()
    for _ in range(50):
        [token_id] = _ids(sample(logits, [row]))
        row.accept(token_id)
        ids.add(token_id)
    assert len(ids) > 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_the_first_largest(dtype: torch.dtype) -> None:
    logits = _logits(8, 1500).to(dtype)
    assert _ids(sample(logits, [_row() for _ in range(8)])) == logits.float().argmax(-1).tolist()
    tied = torch.zeros(1, 1500, dtype=dtype)
    tied[0, [400, 30, 900]] = 1.0
    assert _ids(sample(tied, [_row()])) == [30]


def test_tiny_temperatures_are_greedy() -> None:
    logits = _logits(4, 1500) * 100
    rows = [_row(seed=seed, temperature=temperature) for seed, temperature in enumerate((1e-3, 1e-8, 1e-30, 1e-45))]
    assert _ids(sample(logits, rows)) == logits.argmax(-1).tolist()


def test_padding_is_never_chosen() -> None:
    logits = _logits(40, 1600)
    logits[:, 1500:] = 50.0
    settings = [{}, *({**setting, "logprobs": True, "top_logprobs": 5} for setting in _SETTINGS)]
    rows = [_row(seed=i, **setting) for i, setting in enumerate(settings)]
    choices = sample(logits[: len(rows)], rows)
    assert max(_ids(choices)) < 1500
    tops = [choice.logprob.top for choice in choices if isinstance(choice, SampledToken) and choice.logprob]
    assert max(token_id for top in tops for token_id, _ in top) < 1500


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = _logits(3, 1500).bfloat16()
    rows = [
        _row(temperature=0.5, top_k=3, repetition_penalty=1.5, logit_bias={9: 50.0}, logprobs=True, top_logprobs=4),
        _row(logprobs=True),
        _row(temperature=2.0),
    ]
    first, second, third = sample(logits, rows)
    table = logits.float().log_softmax(-1)
    assert isinstance(first, SampledToken) and first.logprob is not None
    assert first.token_id == first.logprob.token_id == 9
    assert first.logprob.logprob == pytest.approx(float(table[0, 9]))
    assert [value for _, value in first.logprob.top] == pytest.approx(table[0].topk(4).values.tolist())
    assert isinstance(second, SampledToken) and second.logprob is not None and second.logprob.top == ()
    assert isinstance(third, SampledToken) and third.logprob is None


def test_the_logits_are_left_as_they_are() -> None:
    logits = _logits(2, 1500)
    before = logits.clone()
    sample(logits, [_row(repetition_penalty=2.0, logit_bias={1: 5.0}), _row(temperature=1.0, top_p=0.5)])
    assert torch.equal(logits, before)


def test_a_bad_row_fails_alone() -> None:
    logits = _logits(8, 1500)
    logits[1, 5] = math.nan
    logits[2] = -math.inf
    logits[4, 3] = math.nan
    logits[5] = -math.inf
    logits[6, 2] = math.inf
    rows = [*(_row(logprobs=True) for _ in range(4)), *(_row(temperature=1.0, top_p=0.9) for _ in range(4))]
    choices = sample(logits, rows)
    assert [isinstance(choice, GenerationFailed) for choice in choices] == [False, True, True, False] + [True] * 3 + [
        False
    ]


def test_a_row_with_everything_excluded_but_one_still_chooses() -> None:
    logits = torch.full((len(_SETTINGS), 1500), -math.inf)
    logits[:, 77] = 1.0
    rows = [_row(seed=i, **setting) for i, setting in enumerate(_SETTINGS)]
    assert set(_ids(sample(logits, rows))) == {77}


def test_ends_are_held_off_until_min_tokens() -> None:
    logits = torch.zeros(1, 10)
    logits[0, [2, 5]] = 9.0
    for end_ids, expected in (((2, 5), {0}), ((5,), {2})):
        row = _row(vocab_size=10, min_tokens=1, end_ids=end_ids)
        assert set(_ids(sample(logits, [row]))) == expected
        row.accept(0)
        assert _ids(sample(logits, [row])) == [2]


def _allowing(ids: torch.Tensor, vocab_size: int, start: Any) -> TokenMatcher:
    """A matcher at the start of a constraint that allows exactly these tokens."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[ids] = 1
    return TokenMatcher(start.deep_copy(), (), np.packbits(bits, bitorder="little"), vocab_size, (), (), "grammar")


def test_among_the_tokens_that_a_constraint_allows_the_rest_changes_nothing() -> None:
    """A few allowed tokens are drawn from their own table, with the result of a row with -inf for all others."""
    vocab_size = 1500
    start = ConstraintCompiler(byte_tokenizer()).submit(Constraint(ConstraintKind.REGEX, "[ab]{9}", "f")).result().start
    settings = [*_SETTINGS, {"temperature": 0.0}]
    counts = [1, 2, 60, 127, 128, 129, 500, 1400] * len(settings)
    logits, expected_logits = _logits(len(counts), vocab_size), torch.full((len(counts), vocab_size), -torch.inf)
    constrained, free = [], []
    for number, count in enumerate(counts):
        ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(number))[:count]
        expected_logits[number, ids] = logits[number, ids]
        setting = settings[number % len(settings)]
        free.append(_row(seed=number, vocab_size=vocab_size, **setting))
        constrained.append(
            _row(seed=number, vocab_size=vocab_size, matcher=_allowing(ids, vocab_size, start), **setting)
        )
    expected = _ids(sample(expected_logits, free))
    assert _ids(sample(logits, constrained)) == expected
    order = random.Random(0).sample(range(len(counts)), 100)
    mixed = [constrained[i] if i % 3 else free[i] for i in order]
    both = torch.where(torch.tensor([i % 3 > 0 for i in range(len(counts))])[:, None], logits, expected_logits)
    assert _ids(sample(both, mixed, order)) == [expected[i] for i in order]


@pytest.mark.parametrize("count", [FEW - 1, FEW, FEW + 1])
def test_a_constraint_that_allows_about_as_many_tokens_as_a_table_holds_gives_those_of_whole_rows(count: int) -> None:
    """With so many candidates, the last one has its own noise in a table; in a whole row it belongs to the tail."""
    vocab_size, rows = 1500, 1000
    start = ConstraintCompiler(byte_tokenizer()).submit(Constraint(ConstraintKind.REGEX, "[ab]{9}", "f")).result().start
    ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(1))[:count]
    logits, whole = _logits(1, vocab_size, spread=0.3), torch.full((1, vocab_size), -torch.inf)
    whole[0, ids] = logits[0, ids]
    options: dict[str, Any] = {"vocab_size": vocab_size, "temperature": 1.0}
    constrained = [_row(seed=seed, matcher=_allowing(ids, vocab_size, start), **options) for seed in range(rows)]
    free = [_row(seed=seed, **options) for seed in range(rows)]
    assert _ids(sample(logits, constrained, [0] * rows)) == _ids(sample(whole, free, [0] * rows))


def test_no_rows_no_choices() -> None:
    assert sample(torch.zeros(0, 10), []) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 64, 259, 1000])
def test_greedy_rows_get_their_maximum_the_first_of_equals_and_none_of_a_nan(width: int, dtype: torch.dtype) -> None:
    padded = torch.randint(0, 50, (9, width + 5), generator=torch.Generator().manual_seed(width)).to(dtype)
    logits = padded[:, :width]
    rows = [_row(vocab_size=width) for _ in logits]
    expected = (logits == logits.amax(dim=-1, keepdim=True)).int().argmax(dim=-1).tolist()
    assert _ids(sample(padded, rows)) == expected
    logits[4, width // 2] = float("nan")
    logits[6, 0] = float("inf")
    chosen = sample(padded, rows)
    assert [row for row, choice in enumerate(chosen) if isinstance(choice, GenerationFailed)] == [4, 6]
