"""Quantised weights by transformers' own configs are served where they run, and otherwise refused by name."""

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from mlserver_torch_stream.engine.build import BuiltEngine, build_engine
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.loading import loader, quantised
from mlserver_torch_stream.engine.loading.placement import bytes_of
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.settings import ENV_CACHE, parse_settings
from tests.engine.tiny import greedy, prompt_of, reference, run, tokens_of
from tests.engine.tiny_gguf import write_tiny_gguf

REQUESTS = [(prompt_of(3 + 4 * i, i), 10) for i in range(4)]
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.fixture(autouse=True)
def _kernels_compiled_once(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_CACHE, str(kernel_cache))


@contextmanager
def built(folder: Path, config: dict[str, Any] | None, **extra: Any) -> Iterator[BuiltEngine]:
    given = {"dtype": "float32", "threads": 1, "cache_dir": os.environ.get(ENV_CACHE), **extra}
    if config is not None:
        given["quantization_config"] = config
    engine = build_engine(parse_settings(uri=str(folder), extra=given, environ={}), resources=ProcessResources())
    try:
        yield engine
    finally:
        engine.shutdown()


async def together(engine: BuiltEngine) -> list[list[int]]:
    worker = engine.engine
    assert isinstance(worker, EngineCore)
    return list(await asyncio.gather(*(tokens_of(worker, prompt, greedy(count)) for prompt, count in REQUESTS)))


def answers_of(model: PreTrainedModel) -> list[list[int]]:
    model.generation_config.eos_token_id = None
    return [reference(model, prompt, count) for prompt, count in REQUESTS]


def weight_bytes(model: Any) -> int:
    return sum(bytes_of(parameter) for parameter in model.parameters())


def served(folder: Path, config: dict[str, Any], expected: list[list[int]]) -> str:
    with built(folder, config) as engine:
        assert run(together(engine)) == expected
        model = engine.lease.value.weights.value.weights.model
        dense = weight_bytes(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        assert weight_bytes(model) < 0.6 * dense
        assert "our own kernels" not in engine.summary and "up to 32 sequences" in engine.summary
        return engine.summary


# transformers warns where we refuse.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:You passed .quantization_config.:UserWarning")
def test_four_bits_of_bitsandbytes_give_the_quantised_models_tokens(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model, quantization_config=BitsAndBytesConfig(**NF4), dtype=torch.float32
    ).eval()
    model.save_pretrained(tmp_path / "packed")  # before it computes: on CPUs that lays the weights out anew
    expected = answers_of(model)
    dense = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    assert expected != answers_of(dense)
    said = served(tiny_model, NF4, expected)
    assert "quantised by bitsandbytes" in said
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / file, tmp_path / "packed")
    with built(tmp_path / "packed", None) as engine:
        assert run(together(engine)) == expected
        assert "quantised by bitsandbytes" in engine.summary
    for asked, says in (
        ({"load_in_8bit": True}, r"config\.load_in_8bit: True cannot be applied, .* already quantised with False"),
        ({**NF4, "bnb_4bit_quant_type": "fp4"}, r"config\.bnb_4bit_quant_type: 'fp4' cannot be applied, .* with 'nf4'"),
    ):
        with pytest.raises(LoadFailed, match=says), built(tmp_path / "packed", asked):
            pass
    with built(tmp_path / "packed", NF4):  # what it is anyway
        pass
    with (
        pytest.raises(LoadFailed, match=r"extra\.weights: int8 is for dense weights"),
        built(tmp_path / "packed", None, weights="int8", dtype="bfloat16"),
    ):
        pass


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:You passed .quantization_config.:UserWarning")
def test_eight_bits_of_bitsandbytes_give_the_quantised_models_tokens(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model, quantization_config=BitsAndBytesConfig(load_in_8bit=True), dtype=torch.float32
    ).eval()
    model.save_pretrained(tmp_path / "packed")
    expected = answers_of(model)
    dense = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    assert expected != answers_of(dense)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / file, tmp_path / "packed")
    caplog.clear()
    for folder, config in ((tiny_model, {"load_in_8bit": True}), (tmp_path / "packed", None)):
        with built(folder, config) as engine:
            assert run(together(engine)) == expected
            assert weight_bytes(engine.lease.value.weights.value.weights.model) < 0.6 * weight_bytes(dense)
            # Its outliers, which the load has found out.
            assert "one request at a time (batched logits differ from single ones" in engine.summary
            assert "quantised by bitsandbytes" in engine.summary
    assert "inputs will be cast" not in caplog.text


@pytest.mark.long
def test_eight_bits_without_outliers_are_batched(tiny_model: Path) -> None:
    with built(tiny_model, {"load_in_8bit": True, "llm_int8_threshold": 0.0}) as engine:
        assert "up to 32 sequences" in engine.summary
        assert [len(tokens) for tokens in run(together(engine))] == [count for _, count in REQUESTS]


def test_eight_bits_depend_on_company_where_that_has_outliers(tiny_model: Path) -> None:
    """As docs/devices.md says: if any row has an outlier in a column, no row's values are rounded there."""
    rows = torch.rand(3, 64, generator=torch.Generator().manual_seed(1))
    outlier = rows.clone()
    outlier[2, 5] = 7.0
    for threshold, company in ((6.0, False), (0.0, True)):
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
        model = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=config, dtype=torch.float32)
        layer = model.model.layers[0].self_attn.q_proj
        with torch.inference_mode():
            alone = layer(rows[:1])
            assert torch.equal(layer(rows)[:1], alone)
            assert torch.equal(layer(outlier)[:1], alone) is company


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "gtpq"}, r"quant_method: unknown 'gtpq'; did you mean 'gptq'\?"),
        ({}, r"quantization_config: quant_method is missing; known: .*torchao"),
        ({"quant_method": "bitsandbytes"}, r"needs load_in_4bit or load_in_8bit"),
        ({"quant_method": "bitsandbytes_8bit"}, r"needs load_in_4bit or load_in_8bit"),
        ({"quant_method": "gptq", "load_in_4bit": True}, r"quant_method: 'gptq' cannot be combined with load_in_4bit"),
        ({"quant_method": ["gptq"]}, r"quant_method: unknown \['gptq'\]"),
        ({"load_in_4bit": True, "bnb_4bit_type": "nf4"}, r"unknown key 'bnb_4bit_type' .* mean 'bnb_4bit_quant_type'"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "float7"}, r"bitsandbytes_4bit: .*float7"),
        ({"load_in_4bit": "yes"}, r"bitsandbytes_4bit: load_in_4bit must be a boolean"),
        ({"quant_method": "gptq", "bits": 4}, r"requires optimum"),
        ({"quant_method": "awq"}, r"QuantizationMethod\.AWQ does require the model to be pre-quantized"),
        ({"quant_method": "gguf"}, r"quant_method: 'gguf' is only for \.gguf files"),
    ],
)
def test_what_cannot_run_is_refused_by_name(tiny_model: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(LoadFailed, match=f"cannot load {tiny_model.name}: .*{says}"), built(tiny_model, config):
        pass


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"requires optimum \(`pip install optimum`\)"),
        ({"quant_method": "awq", "bits": 4}, r"requires gptqmodel"),
        ({"quant_method": "parrot"}, r"the checkpoint is quantised as 'parrot'; transformers knows .*gptq"),
    ],
)
def test_a_checkpoint_that_cannot_run_is_refused_by_name(
    tiny_model: Path, tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    folder = checkpoint(tiny_model, tmp_path / "tiny", config)
    with pytest.raises(LoadFailed, match=f"cannot load tiny: .*{says}"), built(folder, None):
        pass


def checkpoint(source: Path, folder: Path, config: dict[str, Any]) -> Path:
    """A copy of the checkpoint whose config says that it is quantised."""
    shutil.copytree(source, folder)
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**own, "quantization_config": config}))
    return folder


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}


def in_fp8(source: Path, folder: Path) -> Path:
    """A checkpoint in 8-bit floats.

    Each block of 16 x 16 has the scale 1, so that its values are the rounded weights.
    """
    checkpoint(source, folder, FP8)
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        weights[name] = tensor
        if "_proj" in name:
            weights[name] = tensor.to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = torch.ones(tensor.shape[0] // 16, tensor.shape[1] // 16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_weights_that_transformers_dequantises_quietly_are_refused_unless_asked_for(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = in_fp8(tiny_model, tmp_path / "tiny")
    with (
        pytest.raises(LoadFailed, match=r'cannot be kept packed .* to 489\.2 KiB; .* "dequantize": true'),
        built(folder, None),
    ):
        pass
    with built(folder, {"quant_method": "fp8", "dequantize": True}, fast_path="off") as engine:
        assert "quantised" not in engine.summary and len(run(together(engine))) == len(REQUESTS)


@pytest.mark.parametrize(
    ("device_map", "device"),
    [(None, "cuda"), ("auto", "cuda"), ({"": 0}, "cuda"), ("cpu", "cpu"), ({"": "cpu"}, "cpu")],
)
def test_a_method_is_tried_where_the_weights_will_be(
    device_map: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = parse_settings("embedded://x", {"device_map": device_map}, environ={}).settings
    assert loader._meant_for(settings) == (torch.device(device), torch.bfloat16)


def test_gguf_is_kept_packed_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    packed = {"quant_method": "gguf"}
    with pytest.raises(LoadFailed, match=r"only with GPU kernels, which need the package kernels"), built(file, packed):
        pass
    with pytest.raises(LoadFailed, match=r"gguf has no other keys"), built(file, {**packed, "dequantize": True}):
        pass
    # As where the package is installed and has no kernel for this machine: transformers says so in a warning only.
    monkeypatch.setattr(quantised, "is_kernels_available", lambda: True)
    with pytest.raises(LoadFailed, match=r"gguf weights cannot be kept packed here"), built(file, packed):
        pass


def test_int8_of_our_own_and_a_quantisation_of_transformers_exclude_each_other(tiny_model: Path) -> None:
    with pytest.raises(SettingsError, match=r"extra\.weights: int8 needs our own kernels"):
        parse_settings(uri=str(tiny_model), extra={"weights": "int8", "quantization_config": NF4}, environ={})
