"""Figures of made-up answers, against values computed by hand, and the least time of a step."""

from __future__ import annotations

import shutil
from dataclasses import asdict

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from benchmarks.answers import Answer, Ask, WrongCount, check
from benchmarks.figures import best_and_median, disturbance, percentile, spread, summarize
from benchmarks.limits import LimitsProgram, NotDense, model_of
from benchmarks.roofline import UNITS, Limits, Model, Work, share
from mlserver_torch_stream.engine.native.kernel_variants import runnable

MODEL = Model(projections=1000, head=100, layers=2, heads=4, kv_heads=2, head_dim=8, weight_bytes=2 * 1100)


def _answer(started: float, *arrivals: float, tokens: int | None = None) -> Answer:
    return Answer(started, arrivals[-1], arrivals, 128, len(arrivals) if tokens is None else tokens)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([5.0], 0.99, 5.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([*map(float, range(101))], 0.9, 90),
    ],
)
def test_percentiles_lie_between_the_nearest_ranks(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == pytest.approx(expected)


def test_no_values_have_no_percentile() -> None:
    assert spread("itl", []) == {}
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 0.5)


def test_waves_add_up_without_the_time_between_them() -> None:
    waves = [[_answer(0.0, 0.1, 0.2), _answer(0.0, 0.2, 0.5)], [_answer(10.0, 10.1, 10.5)]]
    figures = summarize(waves)
    assert figures["seconds"] == pytest.approx(1.0)
    assert figures["tokens_per_s"] == pytest.approx(6.0)
    assert figures["ttft_p50_ms"] == pytest.approx(100.0)
    assert figures["itl_max_ms"] == pytest.approx(400.0)


def test_steady_is_after_the_last_first_token_and_before_the_first_last_one() -> None:
    early = _answer(0.0, 1.0, 2.0, 2.1, 2.2)  # waits a second while the other is prefilled
    late = _answer(0.0, 2.0, 2.1, 2.2, 3.2)
    figures = summarize([[early, late]])
    assert figures["itl_max_ms"] == pytest.approx(1000.0)
    assert figures["itl_steady_max_ms"] == pytest.approx(100.0)
    assert figures["steady_tokens_per_s"] == pytest.approx(4 / 0.2)


def test_a_disturbance_is_seen_by_those_that_were_running() -> None:
    running = _answer(0.0, 1.0, 1.1, 1.9, 2.0, 5.0)  # 800 ms as the long prompt comes at 1.2
    over = _answer(0.0, 0.1, 1.0)
    figures = disturbance([running, over], [_answer(1.2, 1.95, 2.5)])
    assert figures["running_at_arrival"] == 1
    assert figures["ttft_p50_ms"] == pytest.approx(750.0)
    assert figures["itl_max_ms"] == pytest.approx(800.0)
    assert figures["burst_tokens_per_s"] == pytest.approx((128 + 2) / 0.75)


def test_best_is_most_tokens_and_least_waiting() -> None:
    best, median = best_and_median(
        [{"tokens_per_s": 1.0, "ttft_p50_ms": 1.0}, {"tokens_per_s": 3.0, "ttft_p50_ms": 3.0}]
    )
    assert best == {"tokens_per_s": 3.0, "ttft_p50_ms": 1.0}
    assert median == {"tokens_per_s": 2.0, "ttft_p50_ms": 2.0}


def test_a_wrong_count_is_an_error() -> None:
    ask = Ask("text", 128, 3)
    check(ask, _answer(0.0, 0.1, 0.2, tokens=3))  # two tokens may come in one event
    with pytest.raises(WrongCount, match="2 new tokens"):
        check(ask, _answer(0.0, 0.1, 0.2))
    with pytest.raises(WrongCount, match="prompt tokens"):
        check(Ask("text", 100, 2), _answer(0.0, 0.1, 0.2))


def test_a_step_reads_all_weights_and_its_keys_and_values_once() -> None:
    work = MODEL.decode(rows=3, context=9)
    assert work.bytes == 2 * 1100 + 2 * 2 * (3 * 10) * 2 * (2 * 8)
    assert work.operations == 2 * 3 * 1100 + 4 * (3 * 10) * 2 * (4 * 8)


def test_of_a_prompt_only_the_last_token_meets_the_head() -> None:
    work = MODEL.prefill(tokens=5)
    assert work.operations == 2 * (5 * 1000 + 100) + 4 * 15 * 2 * (4 * 8)


@pytest.mark.parametrize(("int8", "unit"), [(900.0, "int8"), (0.0, "fp32")])
def test_packed_weights_are_multiplied_by_the_next_unit_where_the_cpu_has_none_for_integers(
    int8: float, unit: str
) -> None:
    limits = Limits(read=1000.0, peaks={"matrix": 0.0, "bf16": 0.0, "fp32": 250.0, "int8": int8})
    assert limits.packed_unit() == unit


def test_the_longer_of_both_times_is_the_limit() -> None:
    limits = Limits(read=1000.0, peaks={"matrix": 0.0, "bf16": 500.0, "fp32": 250.0, "int8": 0.0})
    assert Work(2000, 500).least_ms(limits, limits.bf16_unit()) == 2000
    assert Work(2000, 1500).least_ms(limits, "bf16") == 3000
    assert Work(2000, 1500).least_ms(limits, "fp32") == 6000


def test_a_share_is_the_least_time_over_the_measured_one() -> None:
    limits = Limits(read=1e6, peaks={"matrix": 0.0, "bf16": 1e6, "fp32": 5e5, "int8": 0.0})
    roofline = {"limits": asdict(limits), "model": asdict(MODEL), "unit": "bf16"}
    step = MODEL.decode(4, 9).least_ms(limits, "bf16")
    steady = {"steady_tokens_per_s": 4 * 1000 / (2 * step)}  # steps take twice as long as they must
    assert share("c4", steady, 5, 8, roofline) == pytest.approx(0.5)
    first = MODEL.prefill(100).least_ms(limits, "bf16")
    assert share("p100", {"ttft_p50_ms": 4 * first}, 5, 8, roofline) == pytest.approx(0.25)
    assert share("mix", steady, 5, 8, roofline) is None and share("c4", {}, 5, 8, roofline) is None


def test_a_dense_model_has_its_sizes_and_a_mixture_of_experts_is_refused() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=24, num_key_value_heads=1))
    layers = 2 * (16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 24)
    assert model_of(model) == Model(layers, 50 * 16, 2, 2, 1, 8, 2 * (layers + 50 * 16))
    assert model_of(model, weight_bytes=5).weight_bytes == 5
    with pytest.raises(NotDense, match="mixtral"):
        model_of(MixtralForCausalLM(MixtralConfig(**sizes, intermediate_size=24, num_key_value_heads=1)))


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None or not runnable(), reason="no C++ compiler, or no variant for this CPU")
def test_a_machine_has_a_memory_and_a_unit() -> None:
    limits = LimitsProgram(runnable()[0].name, threads=2, seconds=0.02, megabytes=4).limits()
    assert limits.read > 0 and limits.peaks["fp32"] > 0
    assert limits.bf16_unit() in UNITS and limits.peaks[limits.bf16_unit()] > 0
