"""The limits of a machine: what a step cannot do without, and a measurement that runs."""

from __future__ import annotations

import shutil

import pytest

from benchmarks.limits import UNITS, Limits, Model, Work, measure
from mlserver_torch_stream.engine.native.kernel_variants import runnable

MODEL = Model(projections=1000, head=100, layers=2, heads=4, kv_heads=2, head_dim=8, item=2)


def test_a_step_reads_all_weights_and_its_keys_and_values_once() -> None:
    work = MODEL.decode(rows=3, context=9)
    assert work.bytes == 2 * 1100 + 2 * 2 * (3 * 10) * 2 * (2 * 8)
    assert work.operations == 2 * 3 * 1100 + 4 * (3 * 10) * 2 * (4 * 8)


def test_of_a_prompt_only_the_last_token_meets_the_head() -> None:
    work = MODEL.prefill(tokens=5)
    assert work.operations == 2 * (5 * 1000 + 100) + 4 * 15 * 2 * (4 * 8)


def test_the_longer_of_both_times_is_the_limit() -> None:
    limits = Limits(read=1000.0, peaks={"matrix": 0.0, "bf16": 500.0, "fp32": 250.0, "int8": 0.0})
    assert Work(2000, 500).least_ms(limits, bf16=True) == (2000.0, "memory")
    assert Work(2000, 1500).least_ms(limits, bf16=True) == (3000.0, "the unit")
    assert Work(2000, 1500).least_ms(limits, bf16=False) == (6000.0, "the unit")


@pytest.mark.skipif(shutil.which("c++") is None or not runnable(), reason="no C++ compiler, or no variant for this CPU")
def test_a_machine_has_a_memory_and_a_unit() -> None:
    limits = measure(runnable()[0].name, threads=2, seconds=0.02, megabytes=4)
    assert limits.read > 0 and limits.peaks["fp32"] > 0
    assert limits.peak(bf16=True) == next(limits.peaks[unit] for unit in UNITS if limits.peaks[unit])
