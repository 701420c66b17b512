"""Checkpoints whose files contradict each other are refused by weight name before the model is built."""

from __future__ import annotations

import json
import logging
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlserver_torch_stream.engine.loading.file_damage import read_header
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
from tests.engine.tiny import load_model

_Q = "model.layers.0.self_attn.q_proj"
_INDEX = "model.safetensors.index.json"
_NESTED = "[" * 100 + "]" * 100
Weights = dict[str, torch.Tensor]


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def load(folder: Path) -> Any:
    return load_model(parse_settings(str(folder), {}, environ={})).model


def set_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def change(folder: Path, edit: Callable[[Weights], Any]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file, metadata={"format": "pt"})


def as_float8(weights: Weights) -> None:
    """Converts the projections to float8, with a scale beside each weight."""
    for name in [name for name in weights if "proj" in name]:
        weights[name] = (weights[name] * 100).to(torch.float8_e4m3fn)
        weights[f"{name}_scale"] = torch.tensor([0.01])


def replace(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], None]:
    return lambda weights: weights.update({name: value(weights[name])})


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (as_float8, r"proj\.weight is stored as F8_E4M3, but config\.json has no quantization_config"),
        (
            replace(f"{_Q}.weight", lambda weight: (weight * 100).to(torch.int8)),
            rf"{_Q}\.weight is stored as I8, but config\.json has no quantization_config",
        ),
        (
            lambda weights: weights.update({f"{_Q}.bias": torch.zeros(64)}),
            rf"holds {_Q}\.bias, which the model does not use",
        ),
        (
            lambda weights: weights.update({f"{_Q}.weight_scale_inv": torch.ones(1)}),
            rf"holds {_Q}\.weight_scale_inv, which the model does not use",
        ),
        (
            lambda weights: weights.update({f"{_Q}.qzeros": torch.ones(4, dtype=torch.int32)}),
            rf"holds {_Q}\.qzeros, which the model does not use",
        ),
        (replace(f"{_Q}.weight", lambda weight: weight * torch.nan), rf"{_Q}\.weight holds infinite values or NaN"),
        (
            replace("lm_head.weight", lambda weight: weight.index_fill(0, torch.tensor([3]), -torch.inf)),
            r"lm_head\.weight holds infinite values or NaN",
        ),
    ],
    ids=["float8", "int8", "bias", "scale_inv", "qzeros", "nan", "infinite"],
)
def test_weights_that_would_compute_something_else_are_refused(
    folder: Path, edit: Callable[[Weights], None], says: str
) -> None:
    change(folder, edit)
    with pytest.raises(LoadFailed, match=says):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_any_float_are_loaded_though_no_quantisation_is_named(folder: Path, dtype: torch.dtype) -> None:
    change(folder, lambda weights: weights.update({name: weight.to(dtype) for name, weight in weights.items()}))
    assert load(folder).dtype == torch.float32, "the config's"


@pytest.mark.long
def test_a_header_of_as_many_tensors_as_a_mixture_of_experts_in_four_bits_has_is_read(tmp_path: Path) -> None:
    """The header describes the experts of 48 layers, each with blocks, scales and zeros, in one file."""
    names = [f"model.layers.{layer}.mlp.experts.{expert}.{part}" for layer in range(48) for expert in range(128)
             for part in (f"{name}_proj.{leaf}" for name in ("gate", "up", "down")
                          for leaf in ("qweight", "qzeros", "scales"))]  # fmt: skip
    entries = {name: {"dtype": "I32", "shape": [0, 2048], "data_offsets": [0, 0]} for name in names}
    header = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert len(read_header(tmp_path / "model.safetensors")) == 55_296


def test_other_weights_that_the_model_does_not_take_are_named_in_one_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint has a layer beyond the config's number of layers, and a mask as old checkpoints have."""
    set_config(folder, num_hidden_layers=1)
    change(folder, lambda weights: weights.update({"model.layers.0.self_attn.bias": torch.ones(1, 1, 4, 4)}))
    with caplog.at_level(logging.WARNING, "mlserver_torch_stream"):
        assert load(folder).config.num_hidden_layers == 1
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("mlserver_torch_stream")]
    assert lines == [
        "The checkpoint holds weights that the model does not use: model.layers.0.self_attn.bias, "
        "model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight and 7 more"
    ]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"intermediate_size": 40}, r"gate_proj\.weight has the shape \[\d+, 64\] .* config\.json asks for \[40, 64\]"),
        ({"num_attention_heads": 0}, r"num_attention_heads must be at least 1, not 0"),
        ({"num_hidden_layers": "2"}, r"num_hidden_layers must be at least 1, not 2"),
        ({"vocab_size": 2**31}, r"vocab_size is 2,147,483,648, but the checkpoint holds only [\d,]+ bytes"),
        ({"num_hidden_layers": 10**7}, r"num_hidden_layers is 10,000,000, but the checkpoint holds only \d+ tensors"),
        ({"text_config": {"n_routed_experts": 10**9}}, r"n_routed_experts is 1,000,000,000, but"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config has no quant_method"),
        ({"quantization_config": [4]}, r"quantization_config must be an object"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            r"bitsandbytes has quantised the weights, but all of them are dense, such as .* as F32; remove",
        ),
        ({"transformers_weights": "../other.safetensors"}, r"transformers_weights must name a file of the folder"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_config_that_the_weights_contradict_is_refused_by_its_field(
    folder: Path, fields: dict[str, Any], says: str
) -> None:
    set_config(folder, **fields)
    with pytest.raises(LoadFailed, match=says) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_more_weights_than_the_files_can_hold_are_refused_before_memory_is_taken(folder: Path) -> None:
    """transformers might convert the weights' names, so that shapes cannot be compared by name."""
    set_config(folder, intermediate_size=2**30)
    change(folder, lambda weights: [weights.update({f"other.{name}": weights.pop(name)}) for name in list(weights)])
    with pytest.raises(LoadFailed, match=r"asks for [\d,]+ parameters, but the checkpoint holds only [\d,]+ bytes"):
        load(folder)


@pytest.mark.parametrize("shard", ["/etc/passwd", "../outside.safetensors", "a/../../outside.safetensors"])
def test_an_index_that_names_a_file_outside_of_the_folder_is_refused(folder: Path, shard: str) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / _INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    with pytest.raises(LoadFailed, match=rf"{_INDEX}: weight_map names '{shard}', which is not a file of the folder"):
        load(folder)


def test_a_pickle_that_is_named_where_safetensors_belong_is_refused(folder: Path) -> None:
    """transformers would read both, and a folder with any safetensors file is not one of pickles."""
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "adapter_model.bin")
    weights.rename(folder / "unused.safetensors")
    (folder / _INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "adapter_model.bin"}}))
    says = "names 'adapter_model.bin', which is not a safetensors file"
    with pytest.raises(LoadFailed, match=f"{_INDEX}: weight_map {says}"):
        load(folder)
    set_config(folder, transformers_weights="adapter_model.bin")
    with pytest.raises(LoadFailed, match=rf"config\.json: transformers_weights {says}"):
        load(folder)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[1]", "must contain a JSON object"),
        ("{}", "weight_map must name the file of each weight"),
        ('{"weight_map": {"a": 1}}', "weight_map must name the file of each weight"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "weight_map names 'gone.safetensors', which does not exist"),
        (f'{{"weight_map": {_NESTED}}}', "is nested too deeply"),
    ],
)
def test_an_index_that_is_no_index_is_named(folder: Path, content: str, says: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / _INDEX).write_text(content)
    with pytest.raises(LoadFailed, match=rf"{_INDEX}: {says}"):
        load(folder)


def test_shards_of_the_folder_are_loaded(folder: Path) -> None:
    whole = load(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "shards").mkdir()
    names = {name: f"shards/{number % 2}.safetensors" for number, name in enumerate(weights)}
    for shard in set(names.values()):
        part = {name: weight for name, weight in weights.items() if names[name] == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert torch.equal(load(folder).lm_head.weight, whole.lm_head.weight)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_json_that_is_nested_deeply_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text(f'{{"model_type": "llama", "other": {_NESTED}}}')
    with pytest.raises(LoadFailed, match=rf"{name}: is nested too deeply"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.safetensors", struct.pack("<Q", 2**25) + bytes(2**25), "has a header of 33,554,432 bytes; at most"),
        ("config.json", b" " * (2**25 + 2), "has 33,554,434 bytes; at most"),
    ],
)
def test_a_file_whose_reading_would_stop_all_streams_is_refused(
    folder: Path, name: str, content: bytes, says: str
) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(LoadFailed, match=f"{name} {says}"):
        load(folder)
