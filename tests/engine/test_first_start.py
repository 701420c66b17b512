"""The first start of a dense model: logits over few layers, the weights of all layers, and what follows a refusal."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer
from transformers.models.smollm3.modeling_smollm3 import SmolLM3DecoderLayer

from mlserver_torch_stream.engine import model as model_module
from mlserver_torch_stream.engine.checks import decoder_check, forward_choice
from mlserver_torch_stream.engine.failures import UnsupportedLayout
from mlserver_torch_stream.engine.loading.loader import LoadedWeights, load_weights
from mlserver_torch_stream.engine.native.compile_kernels import NoKernels
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.weights import Packer
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.work_threads import WorkCancelled
from tests.engine.page_book import prefilled
from tests.engine.test_record import PROMPT, loaded, logits
from tests.engine.tiny_models import tiny_model

LAYERS = 8
_WINDOWS = {"layer_types": [*["sliding_attention"] * 5, "full_attention", *["sliding_attention"] * 2]}
# The third layer is the first one with experts.
_EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "mlp_only_layers": [0, 1, 5],
}
_INT8: dict[str, Any] = {"weights": "int8"}
_MARK = 7.0  # a weight that no other place of a tiny model has


@pytest.fixture
def cache(tmp_path: Path, folder: Path) -> Path:
    """A cache folder that contains only the kernels."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(folder / "kernels")
    return tmp_path / "cache"


@pytest.fixture
def deep(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model of eight layers, with a mark in the sixth, and returns its folder."""

    def write(family: str = "llama", **changes: Any) -> Path:
        model = tiny_model(family, num_hidden_layers=LAYERS, **changes).to(torch.bfloat16)
        with torch.no_grad():
            model.model.layers[5].mlp.down_proj.weight[3, 4] = _MARK
        model.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return write


def layers_run(monkeypatch: pytest.MonkeyPatch, kind: type[torch.nn.Module] = LlamaDecoderLayer) -> set[int]:
    """Returns a set to which each layer of transformers' models adds its number when it runs."""
    run: set[int] = set()
    forward = kind.forward

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        run.add(self.self_attn.layer_idx)
        return forward(self, *args, **options)

    monkeypatch.setattr(kind, "forward", noted)
    return run


@pytest.mark.parametrize(
    ("family", "changes", "extra", "kind", "depth"),
    [
        ("llama", {}, {}, LlamaDecoderLayer, 2),
        ("llama", {"tie_word_embeddings": False}, {}, LlamaDecoderLayer, 2),
        ("llama", {}, _INT8, LlamaDecoderLayer, 2),
        ("smollm3", {}, {}, SmolLM3DecoderLayer, 4),
        ("gemma3_text", _WINDOWS, {}, Gemma3DecoderLayer, 6),
        ("qwen3_moe", _EXPERTS, {}, Qwen3MoeDecoderLayer, 3),
        ("qwen3_moe", _EXPERTS, _INT8, Qwen3MoeDecoderLayer, 3),
    ],
)
def test_transformers_runs_the_first_layers_of_each_kind_alone_and_the_kernels_have_the_logits_of_all(
    family: str,
    changes: dict[str, Any],
    extra: dict[str, Any],
    kind: type[torch.nn.Module],
    depth: int,
    deep: Callable[..., Path],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place, run = deep(family, **changes), layers_run(monkeypatch, kind)
    with caplog.at_level(logging.INFO, "mlserver_torch_stream"):
        prepared, counts = loaded(place, cache, **extra)
    assert run == set(range(depth)) and counts == {"new": 1} and prepared.has_threads
    assert f"Checking the logits of our kernels over {depth} layers" in caplog.text and "batches" not in caplog.text
    assert prepared.findings.spec is not None
    assert sorted(layer for group in prepared.findings.spec.groups for layer in group.layers) == list(range(LAYERS))
    again, counts = loaded(place, cache, **extra)
    assert not counts and again.findings == prepared.findings and torch.equal(logits(again), logits(prepared))
    if not extra:
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16)
        with torch.inference_mode():
            expected, _ = prefilled(NativeForward(model, KernelOptions(2, cache)), model, PROMPT, chunk=4)
        assert torch.equal(logits(prepared), expected)


def test_transformers_weights_are_freed_before_those_of_all_layers_are_laid_out(
    deep: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[Any] = []
    freed = []

    def load(*args: Any) -> LoadedWeights:
        models.append((weights := load_weights(*args)).model)
        return weights

    class Noted(NativeForward):
        def __init__(self, *args: Any, **options: Any) -> None:
            freed.append((len(models[0].model.layers), all(each.is_meta for each in models[0].parameters())))
            super().__init__(*args, **options)

    monkeypatch.setattr(model_module, "load_weights", load)
    monkeypatch.setattr(decoder_check, "NativeForward", Noted)
    loaded(deep(), cache)
    assert freed == [(2, False), (2, True)]


def test_a_layer_whose_code_can_differ_is_a_kind_of_its_own(
    deep: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, run, init = deep(), layers_run(monkeypatch), LlamaAttention.__init__

    def with_a_value(self: Any, config: Any, layer_idx: int) -> None:
        init(self, config, layer_idx)
        self.scales_queries = layer_idx == 6

    monkeypatch.setattr(LlamaAttention, "__init__", with_a_value)
    assert loaded(place, cache)[0].has_threads
    assert run == set(range(7))


def test_a_wrong_panel_of_a_deep_layer_refuses_the_kernels_and_transformers_runs(
    deep: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pack = Packer.pack

    def pack_wrongly(self: Packer, parts: Any, order: Any, groups: int, format: int, to: torch.Tensor) -> None:
        pack(self, parts, order, groups, format, to)
        weights = to.view(torch.bfloat16)
        weights[weights == _MARK] = 6.0

    monkeypatch.setattr(Packer, "pack", pack_wrongly)
    place, run = deep(), layers_run(monkeypatch)
    prepared, _ = loaded(place, cache)
    assert prepared.choice is not None and not prepared.has_threads
    assert prepared.choice.no_kernels == "the kernels read weights that differ from the packed ones"
    assert "is loaded again and checked in all its layers: the kernels read weights that differ" in caplog.text
    assert run == set(range(LAYERS)) and not (cache / "records").exists()
    expected = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16)(torch.tensor([PROMPT])).logits[0, -1]
    assert (logits(prepared) - expected).pow(2).mean().sqrt() < 0.1 * expected.std()


def test_a_deep_layer_whose_results_are_not_finite_fails_the_load(deep: Callable[..., Path], cache: Path) -> None:
    place = deep()
    file = place / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.5.mlp.down_proj.weight"].fill_(3e38)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(LoadFailed, match="the model's logits are NaN"):
        loaded(place, cache)


class Wrong(NativeForward):
    """Has a rotary table that is off by one position."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._rotary.cos = self._rotary.cos.roll(1, 0)


def test_kernels_that_the_first_layers_refuse_are_checked_in_all_layers_at_each_start(
    deep: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_check, "NativeForward", Wrong)
    place, run = deep(), layers_run(monkeypatch)
    for _ in range(2):
        run.clear()
        prepared, counts = loaded(place, cache)
        assert prepared.has_threads and run == set(range(LAYERS)) and counts == {"new": 1}


def replace_kernels(monkeypatch: pytest.MonkeyPatch, kernels: object) -> None:
    for module in (decoder_check, forward_choice):
        monkeypatch.setattr(module, "NativeForward", kernels)


def test_kernels_that_all_layers_refuse_are_not_checked_again_until_something_changes(
    deep: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replace_kernels(monkeypatch, Wrong)
    place, warnings = deep(), []
    for kernels, reasons in ((Wrong, {"new": 1}), (None, {})):
        replace_kernels(monkeypatch, kernels)
        caplog.clear()
        with caplog.at_level(logging.INFO, "mlserver_torch_stream"):
            prepared, counts = loaded(place, cache)
        assert counts == reasons and prepared.choice is not None and not prepared.has_threads
        reason = prepared.choice.no_kernels
        assert reason is not None and reason.startswith("its logits differ from the model's by")
        warnings.append([line for line in caplog.messages if "our own kernels are not used" in line])
        assert len(list((cache / "records").iterdir())) == 1
    assert warnings[0] == warnings[1] == [f"transformers' forward runs, because our own kernels are not used: {reason}"]
    assert "which refused our kernels" in caplog.text
    assert "Checking the logits of our kernels" not in caplog.text and "loaded again" not in caplog.text
    replace_kernels(monkeypatch, NativeForward)
    os.utime(place / "model.safetensors", (1, 1))
    prepared, counts = loaded(place, cache)
    assert prepared.has_threads and counts == {"weights": 1}


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no memory for the decoder"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        TimeoutError("the device does not answer"),
        NoKernels("the compiler c++ took more than 600 s"),
        UnsupportedLayout("the kernels read weights that differ from the packed ones"),
    ],
)
def test_an_error_that_ends_the_check_is_not_recorded(
    error: Exception, deep: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(NativeForward):
        def __call__(self, *args: Any) -> Any:
            raise error

    replace_kernels(monkeypatch, Failing)
    place = deep()
    prepared, counts = loaded(place, cache)
    assert not prepared.has_threads and counts == {"new": 1} and not (cache / "records").exists()
    replace_kernels(monkeypatch, NativeForward)
    prepared, counts = loaded(place, cache)
    assert prepared.has_threads and counts == {"new": 1}


def test_a_cancelled_check_is_not_recorded(
    deep: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cancelled(NativeForward):
        def __call__(self, *args: Any) -> Any:
            raise WorkCancelled

    place = deep()
    for module in (decoder_check, forward_choice):  # while the first layers are compared, and later all layers
        monkeypatch.setattr(decoder_check, "NativeForward", Wrong)
        monkeypatch.setattr(module, "NativeForward", Cancelled)
        with pytest.raises(WorkCancelled):
            loaded(place, cache)
        assert not (cache / "records").exists()
