"""Loading a model: what its files set, what the settings override, where the layers are placed, and why loads fail."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedConfig

from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.loading.generation_config import generation_defaults
from mlserver_torch_stream.engine.loading.loader import LoadedModel, set_threads
from mlserver_torch_stream.engine.machine import Host
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
from tests.engine.page_book import prefilled
from tests.engine.tiny import load_model


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def load(folder: Path, **extra: Any) -> LoadedModel:
    return load_model(parse_settings(str(folder), extra, environ={}))


def edit(path: Path, **values: Any) -> None:
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**data, **values}))


def logits(loaded: LoadedModel) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = loaded.model(torch.tensor([[3, 4, 5, 6]])).logits
    return result


def test_a_folder_is_ready_to_generate(tiny_model: Path) -> None:
    loaded = load(tiny_model)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.dtype == torch.float32, "auto: as the checkpoint has it"
    assert loaded.max_model_len == loaded.model.config.max_position_embeddings
    assert loaded.eos_token_ids == (1,)
    assert loaded.default_sampling == {}, "transformers' own defaults are not the model's wishes"
    assert loaded.description.startswith(f"{tiny_model.name} (llama, ")
    assert "\n" not in loaded.description


def test_the_config_is_read_once_here_and_once_by_transformers(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of a hub id's config asks the hub for the commit."""
    reads, read = [], PreTrainedConfig.get_config_dict

    def counted(*args: Any, **options: Any) -> Any:
        reads.append(args)
        return read(*args, **options)

    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", counted)
    load(tiny_model)
    assert len(reads) == 2


def test_the_output_embeddings_get_contiguous_states(tiny_model: Path) -> None:
    """Otherwise torch copies the whole matrix in each call."""
    model = load(tiny_model).model
    seen = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].stride()))
    with torch.inference_mode():
        prefilled(ModelForward(model), model, [2, 3, 4], chunk=3)
    hidden = model.config.hidden_size
    assert seen == [(hidden, hidden, 1)]


def test_the_settings_reach_the_model(tiny_model: Path) -> None:
    loaded = load(tiny_model, dtype="bfloat16", attn_implementation="eager", chat_template="{{ 'x' }}")
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.model.config._attn_implementation == "eager"
    assert loaded.tokenizer.apply_chat_template([{"role": "user"}], tokenize=False) == "x"


def test_the_tokenizer_may_live_elsewhere(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "tokenizer"
    elsewhere.mkdir()
    for file in folder.glob("*token*"):
        file.rename(elsewhere / file.name)
    assert load(folder, tokenizer=str(elsewhere)).tokenizer.encode("a")
    with pytest.raises(LoadFailed, match="cannot load the tokenizer of model"):
        load(folder)


def test_sampling_defaults_are_what_the_model_sets_overlaid_by_the_settings(folder: Path) -> None:
    edit(folder / "generation_config.json", do_sample=True, temperature=0.6, top_p=0.9, max_new_tokens=77)
    expected = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 77}
    assert load(folder).default_sampling == expected
    overlaid = load(folder, default_sampling={"temperature": 0.0, "min_tokens": 2}).default_sampling
    assert overlaid == {**expected, "temperature": 0.0, "min_tokens": 2}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "top_k": 20, "min_p": 0.1}, {"temperature": 1.0, "top_k": 20, "min_p": 0.1}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)
def test_without_do_sample_a_model_is_greedy(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert generation_defaults(GenerationConfig(**given)) == expected


def test_every_end_of_text_counts(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[7, 9])
    assert load(folder).eos_token_ids == (7, 9, 1)


def test_the_context_is_the_smaller_of_the_models_and_the_settings(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = load(tiny_model).max_model_len
    assert load(tiny_model, max_model_len=100).max_model_len == 100
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert load(tiny_model, max_model_len=own + 1).max_model_len == own
    assert "max_model_len" in caplog.text


def test_layers_offloaded_to_disk_compute_the_same(tiny_model: Path, tmp_path: Path) -> None:
    offload = tmp_path / "offload"
    device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu"}
    device_map |= {"model.layers.1": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    loaded = load(tiny_model, device_map=device_map, offload_folder=str(offload))
    assert torch.equal(logits(loaded), logits(load(tiny_model)))
    assert "on cpu (1 layers), disk (1 layers);" in loaded.description


def test_max_memory_alone_means_an_automatic_map(tiny_model: Path, tmp_path: Path) -> None:
    loaded = load(tiny_model, max_memory={"cpu": "300KB"}, offload_folder=str(tmp_path / "offload"))
    assert "disk" in set(map(str, loaded.model.hf_device_map.values()))


def test_threads_are_the_settings_then_the_hosts(tiny_model: Path, restored_threads: None) -> None:
    host = Host(threads=1, available_bytes=0, threads_origin="test", memory_origin="test")
    assert set_threads(parse_settings(str(tiny_model), {}, environ={}).settings, host) == torch.get_num_threads() == 1
    wanted = parse_settings(str(tiny_model), {"threads": 2}, environ={}).settings
    assert set_threads(wanted, host) == torch.get_num_threads() == 2


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"device_map": "parrot"}, r"device_map 'parrot'"),
        ({"device_map": {"model": "cpu", "lm_heat": "cpu"}}, r"no module 'lm_heat'; did you mean 'lm_head'\?"),
        ({"device_map": {"": "cpu", "gone": "cpu"}}, r"no module 'gone'; its top-level modules are model, lm_head"),
        ({"device_map": {"": "cpu", "model.layers.9": "cpu"}}, r"no module 'model\.layers\.9'; did you mean 'model"),
        ({"device_map": {"": "xla:7"}}, r"device_map \{'': 'xla:7'\}"),
        ({"attn_implementation": "parrot"}, r"parrot"),
        ({"quantization_config": {"bits": 4}}, r"quant_method"),
    ],
)
def test_settings_that_do_not_fit_the_model_fail_in_one_line(
    tiny_model: Path, extra: dict[str, Any], says: str
) -> None:
    with pytest.raises(LoadFailed, match=f"cannot load {tiny_model.name}.*{says}") as error:
        load(tiny_model, **extra)
    assert "\n" not in str(error.value)


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(LoadFailed, match=r"no file named model\.safetensors"):
        load(folder)


def test_an_unknown_architecture_is_named(folder: Path) -> None:
    edit(folder / "config.json", model_type="parrot", architectures=["Parrot"])
    with pytest.raises(LoadFailed, match="`parrot`"):
        load(folder)


def test_a_model_with_its_own_code_asks_for_trust(folder: Path) -> None:
    edit(folder / "config.json", model_type="parrot", auto_map={"AutoConfig": "p.C", "AutoModelForCausalLM": "p.M"})
    with pytest.raises(LoadFailed, match=r"if you trust it, set parameters\.extra\.trust_remote_code to true"):
        load(folder)


def test_weights_that_the_checkpoint_lacks_are_never_made_up(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights["lm_head.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(LoadFailed, match=r"lacks the weights lm_head\.weight"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pth"])
def test_pickled_weights_are_refused_by_name_unless_they_are_allowed(folder: Path, name: str) -> None:
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / name)
    load(folder)  # the pickle is not read where there are safetensors
    file.unlink()
    with pytest.raises(LoadFailed, match=rf"{name} is a pickle.*set parameters\.extra\.allow_pickle to true"):
        load(folder)
    if name == "pytorch_model.bin":  # the other is no name that transformers knows
        assert load(folder, allow_pickle=True).model.num_parameters()


def test_a_pickle_that_holds_code_does_not_run_it_even_if_pickles_are_allowed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": _Harmful(folder / "harm")}, folder / "pytorch_model.bin")
    with pytest.raises(LoadFailed):
        load(folder, allow_pickle=True)
    assert not (folder / "harm").exists()


class _Harmful:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)
