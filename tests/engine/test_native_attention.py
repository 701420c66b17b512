"""Our attention kernels over pages, for models with transformers' forward.

They give the reference's results with any number of threads, and leave to torch what they cannot compute.
"""

from __future__ import annotations

import ctypes
import logging
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.attention.gathered import GatheredAttention
from mlserver_torch_stream.engine.attention.paged_attention import (
    AttentionOptions,
    AttentionShape,
    BatchTensors,
    PagedAttention,
    batch_tensors,
)
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages
from mlserver_torch_stream.engine.cache.pages import Batch, CacheSpec
from mlserver_torch_stream.engine.checks import attention as attention_check
from mlserver_torch_stream.engine.checks.attention import attention_kinds, choose_attention
from mlserver_torch_stream.engine.checks.harness import Verdict
from mlserver_torch_stream.engine.checks.selfcheck import SelfCheckResult
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.native.native_attention import NativeAttention
from tests.engine.attention_case import CPU, MIXED, Case, kernels_alone
from tests.engine.page_book import answers, expected_answers
from tests.engine.reference_attention import reference_attention
from tests.engine.tiny_models import tiny_model

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DIMS = {  # heads, heads of keys, dimensions of keys and of values
    "one group": (4, 4, 64, 64),
    "groups of two, 80": (4, 2, 80, 80),
    "groups of eight, 128": (8, 1, 128, 128),
    "groups of sixteen, 96": (16, 1, 96, 96),
    "more queries than a task's rows allow": (71, 1, 8, 8),
    "values shorter than keys": (6, 3, 192, 128),
    "values shorter than long keys": (4, 1, 576, 512),
    "no whole words of bf16": (3, 3, 5, 7),
}
SIGHTS: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"window": 37},
    "window of one": {"window": 1},
    "chunk": {"chunk": 48},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "window, softcap and sinks": {"window": 20, "softcap": 5.0, "sinks": True},
}


@pytest.fixture(scope="module")
def native(folder: Path) -> NativeAttention:
    return kernels_alone(folder)


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_results_are_the_references(dtype: torch.dtype, dims: str, sight: str, native: NativeAttention) -> None:
    assert Case(dims=DIMS[dims], dtype=dtype, **SIGHTS[sight]).error(native) < TOLERANCE[dtype]


@pytest.mark.parametrize("page_size", [1, 7, 16, 48, 64, 256])
@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_pages_may_have_any_size(dtype: torch.dtype, sight: str, page_size: int, native: NativeAttention) -> None:
    assert Case(dtype=dtype, page_size=page_size, **SIGHTS[sight]).error(native) < TOLERANCE[dtype]


@pytest.mark.parametrize("count", [1, 2, 33, 100])
def test_any_number_of_sequences_is_attended_to_at_once(count: int, native: NativeAttention) -> None:
    lengths = random.Random(count)
    parts = [(lengths.randrange(200), lengths.choice((1, 1, 1, 5, 40))) for _ in range(count)]
    torch.set_num_threads(2)
    assert Case(parts, dtype=torch.bfloat16).error(native) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_near_the_ends_of_their_type_pass(dtype: torch.dtype, native: NativeAttention) -> None:
    """The largest, subnormal and infinite values and NaN give the reference's results.

    Units that multiply bfloat16 numbers treat subnormal ones as zeros.
    """
    case = Case([(0, 1)] * 7, dtype=dtype, dims=(1, 1, 16, 16))
    assert case.layer.values is not None
    table = case.batch.tables[0][:, 0].tolist()
    tiny, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    subnormal = tiny / 8 if dtype == torch.float16 else 0.0
    for page, number in zip(table, [0.0, subnormal, -tiny, most, -most, torch.inf, torch.nan], strict=True):
        case.layer.values[page, :, 0] = number
    torch.testing.assert_close(case.run(native), case.run(reference_attention), rtol=0, atol=0, equal_nan=True)


def test_queries_may_lie_by_heads_and_any_call_may_be_a_part_of_a_larger_tensor(native: NativeAttention) -> None:
    case = Case()
    expected = case.run(native)
    by_heads = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    every_other = torch.stack([case.query, case.query], -1)[..., 0]
    for query in (by_heads, every_other):
        assert not query.is_contiguous()
        assert torch.equal(native(query, case.layer, case.batch, case.options), expected)


def test_the_number_of_threads_and_other_sequences_change_no_bit(native: NativeAttention) -> None:
    case, seen = Case(dtype=torch.bfloat16, sinks=True), []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        seen.append(case.run(native))
    assert all(torch.equal(each, seen[0]) for each in seen)
    sequences = case.batch.batch.sequences
    for number, parts in enumerate(seen[0].split([each.count for each in sequences])):
        tensors = batch_tensors(Batch((sequences[number],)), 16, 1, CPU)
        first = sum(each.count for each in sequences[:number])
        query = case.query[first : first + len(parts)]
        assert torch.equal(native(query, case.layer, tensors, case.options), parts)


def test_several_python_threads_attend_at_once(native: NativeAttention) -> None:
    """Stages of a pipeline do so, each with its own number of threads."""
    cases = [Case(MIXED[number:], dtype=dtype) for number in range(3) for dtype in (torch.float32, torch.bfloat16)]
    expected = [case.run(native) for case in cases]
    wrong: list[int] = []

    def work(number: int) -> None:
        torch.set_num_threads(1 + number % 3)
        wrong.extend(number for _ in range(20) if not torch.equal(cases[number].run(native), expected[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


_POOL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def test_long_work_runs_on_as_many_threads_of_the_pool_as_torch_has_and_short_work_on_the_callers(
    folder: Path,
) -> None:
    asked: list[int] = []

    def run(work: int, data: int, threads: int, flags: int) -> None:
        asked.append(threads)
        crew = [threading.Thread(target=_WORK(work), args=(data,)) for _ in range(threads)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()

    native, pool = kernels_alone(folder), _POOL(run)
    native._pool = ctypes.cast(pool, ctypes.c_void_p).value
    long, short = Case(), Case([(3, 1), (4, 1)])
    for threads, expected in ((1, []), (3, [3])):
        torch.set_num_threads(threads)
        assert long.error(native) < TOLERANCE[torch.float32] and asked == expected
        assert short.error(native) < TOLERANCE[torch.float32] and asked == expected


_THREADS = """
import os, sys, threading
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[2])
from tests.engine.attention_case import Case, kernels_alone

def count():
    return len(os.listdir("/proc/self/task"))

native = kernels_alone(Path(sys.argv[1]))
assert native._pool is not None, native.describe()
case = Case()
case.run(native)
alone = count()
torch.set_num_threads(3)
torch.ones(4000, 4000).add_(1)  # torch starts its threads
torchs = count()
assert torchs == alone + 2, (alone, torchs)
for _ in range(5):
    case.run(native)
    assert count() == torchs, "the kernels started threads beside torch's"
torch.ones(4000, 4000).add_(1)
assert count() == torchs, "torch lost its threads"
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads that Linux lists")
def test_the_kernels_run_on_torchs_own_threads(folder: Path) -> None:
    command = [sys.executable, "-c", _THREADS, str(folder), str(Path(__file__).parents[2])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_keys_and_values_are_written_where_the_layer_writes_them(
    dtype: torch.dtype, threads: int, native: NativeAttention
) -> None:
    torch.set_num_threads(threads)
    key, value = torch.randn(2, 500, 24).to(dtype).transpose(0, 1), torch.randn(500, 2, 10).to(dtype)
    slots = torch.randperm(35 * 16)[:500]
    layers = [LayerPages(0, 35, 16) for _ in range(2)]
    for layer in layers:
        layer.reserve(key.transpose(0, 1), value.transpose(0, 1))
        assert layer.keys is not None and layer.values is not None
        layer.keys.zero_(), layer.values.zero_()
    layers[0].write(key, value, slots)
    native.write(layers[1], key, value, slots)
    assert torch.equal(layers[0].keys, layers[1].keys) and torch.equal(layers[0].values, layers[1].values)


def test_types_that_the_kernels_do_not_know_are_attended_to_otherwise(folder: Path) -> None:
    case, native = Case(dtype=torch.float64), NativeAttention(folder)
    assert torch.equal(case.run(native), case.run(GatheredAttention()))


def test_pages_between_which_other_layers_have_theirs_are_used_otherwise(folder: Path) -> None:
    """``PagedCache.reserve`` makes such pages."""
    case, native = Case(), NativeAttention(folder)
    expected, key = case.run(GatheredAttention()), torch.randn(2, 2, 64)
    assert case.layer.keys is not None and case.layer.values is not None
    pool = torch.stack([case.layer.keys, case.layer.values], dim=1)
    case.layer = replace(case.layer, keys=pool[:, 0], values=pool[:, 1])
    assert torch.equal(case.run(native), expected)
    values = pool[:, 1].clone()
    native.write(case.layer, key, values[0, :, :2].transpose(0, 1), torch.tensor([0, 1]))
    assert torch.equal(pool[0, 0, :, :2], key.transpose(0, 1)) and torch.equal(
        pool[:, 1].nan_to_num(), values.nan_to_num()
    )


# --- models ---

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "llama4_text": {"attention_chunk_size": 8, "max_position_embeddings": 256},
    "mistral": {},
    "gemma2": {"attn_logit_softcapping": 2.0},
    "gemma3_text": {},
    "gpt_oss": {},
    "cohere2": {},
    "gpt2": {},
    "gpt_neox": {},
    "mimo_v2_flash": {
        "head_dim": 12,
        "v_head_dim": 6,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense"] * 3,
    },
}
REQUESTS = [(5, 9), (17, 6), (30, 8)]  # lengths of prompts and answers; the second begins beside the first one's answer


def chosen(model: PreTrainedModel, folder: Path, way: Way = Way.PACKED) -> Verdict[PagedAttention]:
    return choose_attention(model, SelfCheckResult(None, way=way, specs={CPU: CacheSpec(16, ())}), folder)


def attention_shapes(model: PreTrainedModel) -> list[AttentionShape]:
    return [shape for shape, _ in attention_kinds(model, GatheredAttention())]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_the_tokens_of_generate(family: str, folder: Path) -> None:
    model = tiny_model(family, **FAMILIES[family])
    expected = expected_answers(model, REQUESTS)
    attention = chosen(model, folder).candidate
    assert attention is not None
    assert "attention kernels" in attention.describe() and "OpenMP" in attention.describe()
    with torch.inference_mode():
        forward = ModelForward(model, attention=attention)
        assert answers(model, forward, REQUESTS, chunk=7) == expected


def test_the_shapes_that_are_compared_are_those_of_the_models_own_attentions() -> None:
    sinks, softcap = (attention_shapes(tiny_model(family)) for family in ("gpt_oss", "gemma2"))
    assert {(each.window, each.has_sinks, each.key_dim) for each in sinks} == {(6, True, 8), (None, True, 8)}
    assert {(each.window, each.softcap, each.dtype) for each in softcap} == {
        (6, 50.0, torch.float32),
        (None, 50.0, torch.float32),
    }
    (chunked,) = attention_shapes(
        tiny_model("llama4_text", attention_chunk_size=8, layer_types=["chunked_attention"] * 4)
    )
    assert chunked.chunk == 8
    unlike = attention_shapes(tiny_model("mimo_v2_flash", **FAMILIES["mimo_v2_flash"]))
    assert {(each.key_dim, each.value_dim, each.kv_heads, each.has_sinks) for each in unlike} == {
        (12, 6, 4, True),
        (12, 6, 2, False),
    }


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("change", [{"window": 5}, {"softcap": 2.9}, {"sinks": None}, {"scale": 0.34}])
def test_kernels_that_attend_to_something_else_are_found_out(
    change: dict[str, Any],
    dtype: torch.dtype,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An option that is ignored stands for any mistake."""
    model = tiny_model("gpt_oss" if "sinks" in change else "gemma2").to(dtype)
    assert chosen(model, folder).candidate is not None

    class Wrong(NativeAttention):
        def __call__(
            self, query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
        ) -> torch.Tensor:
            return super().__call__(query, layer, batch, replace(options, **change))

    monkeypatch.setattr(attention_check, "NativeAttention", Wrong)
    verdict = chosen(model, folder)
    assert verdict.candidate is None and "differ" in verdict.reason
    assert "the attention kernels are not used" in caplog.text and "differ" in caplog.text


def test_kernels_that_write_elsewhere_are_found_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(NativeAttention):
        def write(self, layer: LayerPages, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
            super().write(layer, key, value, slots.roll(1))

    monkeypatch.setattr(attention_check, "NativeAttention", Wrong)
    verdict = chosen(tiny_model(), folder)
    assert verdict.candidate is None and "elsewhere" in verdict.reason


def test_a_model_whose_attention_cannot_be_replaced_keeps_its_own(folder: Path) -> None:
    for way in (Way.PACKED, Way.MASKED_ROWS):
        assert chosen(tiny_model("bloom"), folder, way).candidate is None


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_models_with_states_take_the_kernels_in_their_attention_layers(family: str, folder: Path) -> None:
    verdict = chosen(tiny_model(family), folder, Way.ROWS)
    assert verdict.candidate is not None, verdict.reason


def test_without_a_compiler_torch_attends_and_the_summary_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    verdict = chosen(tiny_model(), tmp_path)
    assert verdict.candidate is None and "no C++ compiler" in verdict.reason
    assert "the attention kernels are not used" in caplog.text and "no C++ compiler" in caplog.text
