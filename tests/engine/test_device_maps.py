"""Layers on several devices: each layer's cache is where its keys are, and the tokens are those of a single device."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module
from transformers import AutoModelForCausalLM, PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.build import build_engine
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.devices import input_device, plain_forward, weight_device
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.engine.step.continuous import ContinuousBatcher
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
from tests.engine.tiny import byte_tokenizer, collect, greedy, prompt_of, reference, run, running, tokens_of, until
from tests.engine.tiny import tiny_model as make

REQUESTS = [(prompt_of(3 + 5 * i, i), 10 + 3 * i) for i in range(5)]


class OtherDevice(ModelHook):  # type: ignore[misc]
    """Casts a layer's inputs to its dtype and its outputs back, as accelerate's hook moves them between devices.

    A CPU is only one device, so another dtype stands for another device. It is as strict: torch refuses to mix dtypes,
    and a cache allocated for another layer's keys would have the wrong dtype.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _cast(args, self._dtype), _cast(kwargs, self._dtype)

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        return _cast(output, torch.float32)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_cast(each, dtype) for each in value)
    return {key: _cast(each, dtype) for key, each in value.items()} if type(value) is dict else value


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """The model, with its later layers on the other device."""
    for layer in model.model.layers[1:]:
        layer.double()
        align = AlignDevicesHook(execution_device="cpu", io_same_device=True)
        add_hook_to_module(layer, SequentialHook(align, OtherDevice(torch.float64)))
    return model


class Back(ModelHook):  # type: ignore[misc]
    """Moves the output to the device of the input, as accelerate's hook around a whole model does."""

    def __init__(self, offload: bool = False) -> None:
        self.offload = offload

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        output.logits = output.logits.double()
        return output


async def together(engine: EngineCore) -> list[list[int]]:
    sequences = [asyncio.create_task(tokens_of(engine, prompt, greedy(count))) for prompt, count in REQUESTS]
    return [await sequence for sequence in sequences]


@pytest.mark.parametrize(
    "family",
    ["llama", "gemma3_text", *(pytest.param(each, marks=pytest.mark.long) for each in ("qwen3", "gemma2", "lfm2"))],
)
def test_layers_on_two_devices(family: str) -> None:
    model = spread(make(family))
    expected = [reference(model, prompt, count) for prompt, count in REQUESTS]
    with running(model) as engine:
        assert run(together(engine)) == expected


def test_each_layers_pages_live_where_its_keys_are() -> None:
    model = spread(make("llama"))

    async def scenario(engine: EngineCore) -> list[torch.dtype]:
        stream = engine.submit([EngineRequest(prompt_of(5), greedy(100))])
        await until(lambda: engine.stats().running_sequences == 1, "a sequence")
        batcher = engine._batcher
        assert isinstance(batcher, ContinuousBatcher)
        pools = [pages.keys for pages in batcher._cache.layers.values()]
        stream.close()
        return [pool.dtype for pool in pools if pool is not None]

    with running(model) as engine:
        assert run(scenario(engine)) == [torch.float32, torch.float64, torch.float64]
    with torch.inference_mode():
        spread_spec, plain_spec = check_batching(model).spec, check_batching(make("llama")).spec
    assert spread_spec is not None and plain_spec is not None
    # two of three layers twice as large
    assert spread_spec.groups[0].token_bytes == plain_spec.groups[0].token_bytes * 5 // 3


@pytest.mark.parametrize(
    "device_map",
    [
        pytest.param({"": "cpu"}, id="all in memory", marks=pytest.mark.long),
        pytest.param(
            {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
             "model.rotary_emb": "cpu", "lm_head": "cpu"},
            id="a layer on disk",
        ),
        pytest.param({"model": "disk", "lm_head": "cpu"}, id="all layers on disk", marks=pytest.mark.long),
        pytest.param(
            {"model.embed_tokens": "disk", "model.layers": "cpu", "model.norm": "disk", "model.rotary_emb": "cpu",
             "lm_head": "disk"},
            id="embedding and head on disk",
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_weights_on_disk_give_the_same_tokens(tiny_model: Path, tmp_path: Path, device_map: dict[str, str]) -> None:
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    plain.generation_config.eos_token_id = None
    expected = [reference(plain, prompt, count) for prompt, count in REQUESTS]
    resolved = parse_settings(
        uri=str(tiny_model),
        extra={
            "device_map": device_map,
            "offload_folder": str(tmp_path / "offload"),
            "dtype": "float32",
            "engine": "batched",  # the check at load must pass there too
            "threads": 1,
        },
        environ={},
    )
    built = build_engine(resolved, resources=ProcessResources())
    try:
        assert run(together(built.engine)) == expected
        assert ("disk" in built.summary) == ("disk" in device_map.values())
    finally:
        built.shutdown()


@pytest.mark.parametrize("device_map", [{"model": "cpu", "lm_head": "disk"}, {"model": "disk", "lm_head": "cpu"}])
def test_a_tied_head_that_the_map_parts_from_its_embedding_fails_the_load(
    tmp_path: Path, device_map: dict[str, str]
) -> None:
    make("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    extra = {"device_map": device_map, "offload_folder": str(tmp_path / "offload"), "threads": 1}
    with pytest.raises(LoadFailed, match=r"lm_head\.weight|with device_map"):
        build_engine(parse_settings(uri=str(tmp_path / "model"), extra=extra, environ={}), resources=ProcessResources())


def test_an_embedding_on_disk_says_where_it_wants_its_ids(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model, device_map={"model": "disk", "lm_head": "cpu"}, offload_folder=str(tmp_path)
    )
    assert model.get_input_embeddings().weight.device.type == "meta"
    assert input_device(model) == torch.device("cpu")


def test_the_first_gpu_is_a_device_of_an_offloaded_module() -> None:
    """For this GPU, accelerate uses the name 0."""
    embedding = torch.nn.Embedding(4, 2, device="meta")
    embedding._hf_hook = AlignDevicesHook(execution_device=0)
    assert weight_device(embedding, torch.device("cpu")) == torch.device("cuda:0")


# transformers 5.17 takes the weights' place, `meta`, for the ids'; the hooks know better.
@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")
def test_an_offloaded_model_is_served_serially_too(tiny_model: Path, tmp_path: Path) -> None:
    resolved = parse_settings(
        uri=str(tiny_model),
        extra={
            "device_map": {"model": "disk", "lm_head": "cpu"},
            "offload_folder": str(tmp_path),
            "dtype": "float32",
            "engine": "serial",
            "threads": 1,
        },
        environ={},
    )
    built = build_engine(resolved, resources=ProcessResources())
    try:
        events = run(collect(built.engine, [EngineRequest(REQUESTS[0][0], greedy(8))]))
        assert events[0].error is None and len(events[0].token_ids) == 8
    finally:
        built.shutdown()


def test_logits_stay_where_the_last_module_is() -> None:
    model = make("llama")
    layout = CacheLayout(model.config)
    batch = Batch((BatchSequence([1, 2, 3], 0, ((0,),)),))

    def logits() -> torch.Tensor:
        return ModelForward(model)(batch, PagedCache(layout, 4, [1], 0)).tensor

    with torch.inference_mode():
        expected = logits()
        add_hook_to_module(model, Back())
        assert model(torch.ones(1, 1, dtype=torch.long)).logits.dtype == torch.float64
        assert logits().dtype == torch.float32 and torch.equal(logits(), expected)
        assert check_batching(model).problem is None


@pytest.mark.parametrize("hook", [Back(offload=True), SequentialHook(AlignDevicesHook(), Back(offload=True))])
def test_a_hook_that_fetches_weights_is_not_left_out(hook: ModelHook) -> None:
    model = make("llama")
    add_hook_to_module(model, hook)
    assert plain_forward(model) is model
