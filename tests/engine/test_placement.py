"""What a load logs about layers, bytes, cache and moved weights; maps without enough room are refused."""

import asyncio
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.engine.build import BuiltEngine, build_engine
from mlserver_torch_stream.engine.cache.page_counts import size_cache
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.loading.placement import (
    bytes_of,
    describe_moves,
    describe_placement,
    moved_bytes,
    no_room,
    read_placement,
    seconds_per_step,
)
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
from tests.engine.tiny import greedy, prompt_of, reference, run, tokens_of
from tests.engine.tiny import tiny_model as make

SPLIT = {
    "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
    "model.rotary_emb": "cpu", "lm_head": "cpu",
}  # fmt: skip


def loaded(folder: Path, tmp_path: Path, **options: Any) -> PreTrainedModel:
    options = {"offload_folder": str(tmp_path / "offload"), "dtype": torch.float32, **options}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **options)
    return model.eval()


def test_layers_and_bytes_of_each_place(tiny_model: Path, tmp_path: Path) -> None:
    model = loaded(tiny_model, tmp_path, device_map=SPLIT)
    memory, disk = read_placement(model)
    assert (memory.place, memory.layers, memory.brought_to) == ("cpu", (0,), None)
    assert (disk.place, disk.layers, disk.brought_to) == ("disk", (1,), "cpu")
    layer = sum(parameter.numel() * 4 for parameter in model.model.layers[0].parameters())
    everything = sum(tensor.numel() * 4 for tensor in [*model.parameters(), *model.buffers()])
    assert disk.weights == layer and memory.weights == everything - layer
    assert moved_bytes([memory, disk]) == layer
    assert str(memory) == f"cpu: layers 0, embed_tokens, norm, rotary_emb, lm_head ({format_bytes(memory.weights)})"


def test_what_is_moved_at_every_step_is_measured_and_said(tiny_model: Path, tmp_path: Path) -> None:
    model = loaded(tiny_model, tmp_path, device_map=SPLIT)
    with torch.inference_mode():
        seconds = seconds_per_step(model)
    assert seconds > 0
    said = describe_moves(read_placement(model), 0.5)
    assert said.startswith("144.5 KiB of weights are moved from disk to cpu at every step")
    assert "a step of one token takes 0.5 s (289.0 KiB/s), so an answer gets at most 2 tokens/s" in said


def test_max_memory_is_honoured(tiny_model: Path, tmp_path: Path) -> None:
    limit = 300_000
    model = loaded(tiny_model, tmp_path, device_map="auto", max_memory={"cpu": limit})
    held = {each.place: each for each in read_placement(model)}
    assert held["cpu"].weights <= limit
    assert held["disk"].layers == (0, 1) and held["disk"].weights > 0
    resident = sum(bytes_of(tensor) for tensor in model.parameters() if tensor.device.type != "meta")
    assert resident <= limit


def test_one_device_holds_everything(tiny_model: Path, tmp_path: Path) -> None:
    (held,) = read_placement(loaded(tiny_model, tmp_path))
    assert held.place == "cpu" and held.layers == (0, 1) and moved_bytes([held]) == 0


def test_tied_weights_count_once_and_parameters_by_themselves_count() -> None:
    model = make("llama", tie_word_embeddings=True)
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers": 1, "model.norm.weight": 1, "lm_head": 0}
    first, second = read_placement(model)
    assert first.weights == bytes_of(model.lm_head.weight)
    layers = sum(bytes_of(parameter) for parameter in model.model.layers.parameters())
    assert second.weights == layers + bytes_of(model.model.norm.weight)
    assert (first.place, second.place, second.layers) == ("cuda:0", "cuda:1", (0, 1, 2))


def test_weights_on_the_cpu_are_computed_where_a_gpu_is() -> None:
    """accelerate computes on the first device that is not the CPU, which is `meta` here and computes nothing."""
    model = make("llama")
    device_map = {"model": "cpu", "lm_head": "meta"}
    dispatch_model(model, device_map, main_device="meta", force_hooks=True)
    cpu, other = read_placement(model)
    assert cpu.brought_to == "meta" and other.brought_to is None


def test_the_caches_part_of_each_device_is_said(tiny_model: Path, tmp_path: Path) -> None:
    model = loaded(tiny_model, tmp_path, device_map=SPLIT)
    with torch.inference_mode():
        specs = check_batching(model).specs
    placement = read_placement(model)
    size = size_cache([*zip(specs.values(), [2**20], strict=True)], sequences=4, tokens=64, step=8)
    said = describe_placement(placement, specs, size)
    assert said.endswith("KV cache on cpu: 1.0 MiB, 512 bytes a token")
    refusal = no_room(placement, specs, 700, {torch.device("cpu"): 2048})
    assert "a KV cache of 700 bytes is too small for one sequence" in refusal
    assert "on cpu the first page of a sequence takes 8.0 KiB and 2.0 KiB are free" in refusal  # 16 tokens
    assert "disk: layers 1 (144.5 KiB)" in refusal


def built(folder: Path, resources: ProcessResources, **extra: Any) -> BuiltEngine:
    given = {"dtype": "float32", "threads": 1, "fast_path": "off", **extra}
    return build_engine(parse_settings(uri=str(folder), extra=given, environ={}), resources=resources)


def test_the_load_says_what_lies_where_and_how_slow_it_is(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    offload = {"device_map": SPLIT, "offload_folder": str(tmp_path)}
    engine = built(tiny_model, ProcessResources(), **offload, kv_cache_memory="1MiB")
    try:
        said = caplog.text
        assert "144.5 KiB of weights are moved from disk to cpu at every step" in said
        assert "Placement of tiny-llama: cpu: layers 0, embed_tokens" in said
        assert "KV cache on cpu: 1.0 MiB" in said
    finally:
        engine.shutdown()


def test_a_model_without_room_for_its_cache_is_refused_with_the_numbers(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        LoadFailed, match=r"extra\.kv_cache_memory: a KV cache of 7\.0 KiB is too small .* on cpu .* 8\.0 KiB"
    ):
        built(tiny_model, ProcessResources(), kv_cache_memory="7KiB")
    with pytest.raises(LoadFailed, match=r"extra\.prefix_cache_memory: \d+ bytes are more than the KV cache's"):
        built(tiny_model, ProcessResources(), kv_cache_memory=2**20, prefix_cache_memory=2**21)
    others = ProcessResources()
    others.promise("another model", 2**60, 0)  # all that there is
    with pytest.raises(LoadFailed, match=r"device_map: the free memory is too small .* 8\.0 KiB and .* disk: layers 1"):
        built(tiny_model, others, device_map=SPLIT, offload_folder=str(tmp_path))


SPREAD = '''
from transformers import LlamaForCausalLM

class Spread(LlamaForCausalLM):
    """As accelerate would leave it on two GPUs, for a machine without one."""

    hf_device_map = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1,
                     "model.norm": 1, "lm_head": 1}
'''


@pytest.mark.parametrize("pipeline", ["auto", "off"])
def test_a_map_over_two_devices_is_pipelined_unless_the_settings_say_otherwise(
    tiny_model: Path, tmp_path: Path, pipeline: str
) -> None:
    folder = tmp_path / "spread"
    shutil.copytree(tiny_model, folder)
    (folder / "modeling_spread.py").write_text(SPREAD)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_spread.Spread"}
    (folder / "config.json").write_text(json.dumps(config))
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    plain.generation_config.eos_token_id = None
    requests = [(prompt_of(3 + 4 * i, i), 12) for i in range(5)]
    expected = [reference(plain, prompt, count) for prompt, count in requests]

    async def scenario(engine: BuiltEngine) -> list[list[int]]:
        assert isinstance(engine.engine, EngineCore)
        sequences = [asyncio.create_task(tokens_of(engine.engine, prompt, greedy(count))) for prompt, count in requests]
        return [await sequence for sequence in sequences]

    engine = built(folder, ProcessResources(), trust_remote_code=True, pipeline=pipeline)
    try:
        assert "on cuda:0 (1 layers), cuda:1 (1 layers)" in engine.summary
        assert ("2 devices with a batch each" in engine.summary) == (pipeline == "auto")
        assert run(scenario(engine)) == expected
    finally:
        engine.shutdown()


def test_a_memory_limit_that_is_none_is_named(tiny_model: Path) -> None:
    with pytest.raises(LoadFailed, match=r"cannot load tiny-llama with max_memory \{'cpu': 'lots'\}: .*lots"):
        built(tiny_model, ProcessResources(), max_memory={"cpu": "lots"})
