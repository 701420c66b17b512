"""Loads that fail because of the model's files: the error names the damaged file, or says what kind of model it is."""

from __future__ import annotations

import json
import re
import shutil
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from huggingface_hub import constants, hf_hub_download
from transformers import BartConfig, BertConfig, BertForMaskedLM, GPTNeoXConfig, GPTNeoXForCausalLM, T5Config, ViTConfig
from transformers.utils import hub

from mlserver_torch_stream.engine.build import build_engine
from mlserver_torch_stream.engine.loading.locate import refuse_other_kinds
from mlserver_torch_stream.engine.loading.model_files import SERVED
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
from tests.engine.tiny import cached_in_hub
from tests.engine.tiny_gguf import write_tiny_gguf

_POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32\nsize 12345\n"
)


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def refusal(place: Path | str, cache: Path, **extra: str) -> str:
    """Returns the error of a load, which must be one line."""
    with pytest.raises(LoadFailed) as error:
        resolved = parse_settings(str(place), {"cache_dir": str(cache), **extra}, environ={})
        build_engine(resolved, resources=ProcessResources())
    assert "\n" not in str(error.value)
    return str(error.value)


def cut(file: Path, share: float) -> tuple[int, int]:
    """Truncates the file; returns its size in bytes before and after."""
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    return len(whole), int(len(whole) * share)


def test_weights_that_are_cut_off_are_named_with_their_sizes(folder: Path, tmp_path: Path) -> None:
    whole, left = cut(folder / "model.safetensors", 0.5)
    said = refusal(folder, tmp_path)
    assert f"{folder}/model.safetensors is cut off or damaged: it has {left:,} bytes in place of {whole:,}" in said


@pytest.mark.parametrize("share", [0.2, 0.7, 0.99])
def test_a_gguf_file_that_is_cut_off_is_named(tmp_path: Path, share: float) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    _, left = cut(file, share)
    assert f"{file} is cut off or damaged: its {left:,} bytes" in refusal(file, tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.safetensors", _POINTER, "model.safetensors is a Git LFS pointer"),
        ("model.safetensors", "", "model.safetensors is empty"),
        ("model.safetensors", "<!doctype html><title>Sign in</title>", "model.safetensors is cut off, or is no"),
        ("config.json", _POINTER, "config.json is a Git LFS pointer"),
        ("config.json", '{\n"model_type": "llama",\n}', "config.json, line 3, column 1: a comma before"),
        ("tokenizer.json", _POINTER, "tokenizer.json is a Git LFS pointer"),
        ("model.gguf", _POINTER, "model.gguf is a Git LFS pointer"),
        ("model.gguf", "<!doctype html>", "model.gguf is not a GGUF file"),
        ("model.gguf", "", "model.gguf is empty"),
    ],
)
def test_a_file_that_is_something_else_is_named(
    folder: Path, tmp_path: Path, name: str, content: str, says: str
) -> None:
    (folder / name).write_text(content)
    place = folder / name if name.endswith(".gguf") else folder
    assert f"{folder}/{says}" in refusal(place, tmp_path / "cache")


@pytest.mark.parametrize(
    "extra", [{}, pytest.param({"weights": "packed"}, marks=pytest.mark.slow)], ids=["dense", "packed"]
)
def test_a_gguf_file_with_more_layers_than_tensors_is_refused(tmp_path: Path, extra: dict[str, str]) -> None:
    """Otherwise the model would be built layer by layer before any weight is looked up."""
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    data = bytearray(file.read_bytes())
    place = data.index(b"llama.block_count") + len(b"llama.block_count") + 4
    data[place : place + 4] = struct.pack("<I", 10**7)
    file.write_bytes(data)
    said = refusal(file, tmp_path / "cache", **extra)
    assert re.search("llama.block_count is 10000000, .* 2 blocks", said)


@pytest.mark.parametrize(
    ("kind", "says"), [(31, "in Q4_0_4_4, which"), (139, "in the format with the number 139, which")]
)
def test_a_gguf_file_in_a_format_that_is_not_known_is_not_called_damaged(tmp_path: Path, kind: int, says: str) -> None:
    """Such as those that llama.cpp has removed, and those of its forks."""
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    data = bytearray(file.read_bytes())
    name = b"blk.0.attn_q.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions, and two sizes
    data[place : place + 4] = struct.pack("<I", kind)
    file.write_bytes(data)
    said = refusal(file, tmp_path / "cache")
    assert f"it has tensors {says} is not supported" in said and "damaged" not in said


def test_a_gguf_file_in_another_byte_order_is_refused_with_the_program_that_converts_it(tmp_path: Path) -> None:
    other = gguf.GGUFEndian.BIG if sys.byteorder == "little" else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=other)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert f"run 'gguf-convert-endian {tmp_path}/m.gguf native'" in refusal(tmp_path / "m.gguf", tmp_path / "cache")


def test_a_gguf_header_with_more_values_than_its_file_has_bytes_is_refused(tmp_path: Path) -> None:
    key = b"tokenizer.ggml.tokens"
    header = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key
    (tmp_path / "m.gguf").write_bytes(header + struct.pack("<IIQ", 9, 0, 2**20) + b"x")
    assert "m.gguf is cut off or damaged" in refusal(tmp_path / "m.gguf", tmp_path / "cache")


def test_an_encoder_is_refused_before_its_weights_are_read(folder: Path, kernel_cache: Path) -> None:
    """transformers would load these weights into ``BertLMHeadModel``, whose answers make no sense."""
    config = BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    (folder / "model.safetensors").unlink()
    BertForMaskedLM(config).save_pretrained(folder)
    said = refusal(folder, kernel_cache)
    assert f"model type 'bert' (BertForMaskedLM) is an encoder; {SERVED}" in said


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            T5Config(architectures=["T5ForConditionalGeneration"]),
            "'t5' (T5ForConditionalGeneration) is an encoder-decoder",
        ),
        pytest.param(BartConfig(), "'bart' is an encoder-decoder model", marks=pytest.mark.slow),
        pytest.param(ViTConfig(), "ViT is not a causal language model", marks=pytest.mark.slow),
    ],
    ids=["t5", "bart", "vit"],
)
def test_other_kinds_of_models_are_refused_by_name(folder: Path, kernel_cache: Path, config: object, says: str) -> None:
    config.save_pretrained(folder)  # type: ignore[attr-defined]
    said = refusal(folder, kernel_cache)
    assert says in said and SERVED in said


def test_an_adapter_beside_the_weights_is_refused(folder: Path, kernel_cache: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "adapter_config.json belongs to an adapter" in refusal(folder, kernel_cache)


def test_a_hub_id_with_an_adapter_is_refused_before_its_weights_are_downloaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (cached_in_hub(folder, tmp_path / "hub", monkeypatch) / "model.safetensors").unlink()
    asked: list[str] = []

    def download(hub_id: str, name: str, **options: Any) -> Any:
        asked.append(name)
        return hf_hub_download(hub_id, name, **options)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    assert "adapter_config.json belongs to an adapter" in refusal("hf://tiny/llama", tmp_path)
    assert "adapter_config.json" in asked and "model.safetensors" not in asked


def test_a_decoder_whose_config_says_that_it_is_none_is_served() -> None:
    config = GPTNeoXConfig(architectures=[GPTNeoXForCausalLM.__name__])
    assert config.is_decoder is False
    refuse_other_kinds(config)
    refuse_other_kinds(BartConfig(is_encoder_decoder=False, is_decoder=True, architectures=["BartForCausalLM"]))


def test_a_folder_whose_tokenizer_is_missing_says_what_to_set(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    assert re.search(r"no tokenizer in .*parameters\.extra\.tokenizer", refusal(folder, tmp_path))
    assert json.loads((folder / "config.json").read_text())


_BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": _BPE}, "range end index 2 out of range"),
        # A trie of 4 GB, for which the process would be ended where there is no such memory, and an empty one.
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}}, "precompiled_charsmap is cut"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "precompiled_charsmap is cut"),
    ],
    ids=["merge", "charsmap", "short charsmap"],
)
def test_a_tokenizer_over_which_its_library_would_panic_is_refused(
    folder: Path, tmp_path: Path, fields: dict[str, object], says: str
) -> None:
    """The panic of a Rust library is no ``Exception``."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    assert says in refusal(folder, tmp_path)


def test_json_that_a_library_finds_nested_too_deeply_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("[" * 5000 + "]" * 5000)
    assert f"{folder}/tokenizer.json: is nested too deeply" in refusal(folder, tmp_path)


def test_a_hub_id_is_refused_at_once_where_the_hub_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without this check, huggingface_hub tries each of several files five times, which takes two minutes."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("https_proxy", raising=False)
    monkeypatch.delenv("http_proxy", raising=False)
    said = refusal(Path("nobody/none"), tmp_path)
    assert re.match(r"cannot load nobody/none: .* http://127\.0\.0\.1:\d+ cannot be reached: ", said), said
