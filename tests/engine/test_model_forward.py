"""transformers' models over pages: layers with several devices and dtypes, and models that accept other arguments."""

from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from tests.engine.page_driver import PageDriver
from tests.engine.tiny_models import prompt_of, reference, tiny_model

PROMPTS = [prompt_of(5), prompt_of(12, 3), prompt_of(9, 5)]


def answers(model: PreTrainedModel, way: Way = Way.PACKED) -> list[list[int]]:
    """Returns six tokens for each prompt. Two prompts begin together; the third joins them, in two chunks."""
    driver = PageDriver(model, way, 4)
    a, b, c = (driver.join(prompt) for prompt in PROMPTS)
    driver.step([(a, 5), (b, 12)])
    driver.step([(c, 4), (a, 1), (b, 1)])
    driver.step([(b, 1), (c, 5), (a, 1)])
    for _ in range(5):
        driver.step([(each, 1) for each in (a, b, c)])
    return [each.answer[:6] for each in (a, b, c)]


class OtherDtype(ModelHook):  # type: ignore[misc]
    """Casts a layer's inputs to its dtype and its output back, as accelerate's hook moves them between devices.

    A CPU is only one device; torch refuses to mix dtypes as it refuses to mix devices.
    """

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _cast(args, torch.float64), _cast(kwargs, torch.float64)

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        return _cast(output, torch.float32)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_cast(each, dtype) for each in value)
    return {key: _cast(each, dtype) for key, each in value.items()} if type(value) is dict else value


@pytest.mark.parametrize(("family", "way"), [("llama", Way.PACKED), ("gemma3_text", Way.PACKED), ("lfm2", Way.ROWS)])
def test_each_layers_pages_are_where_its_keys_are(family: str, way: Way) -> None:
    model = tiny_model(family)
    expected = [reference(model, prompt, 6) for prompt in PROMPTS]
    for layer in model.model.layers[1:]:
        layer.double()
        add_hook_to_module(layer, SequentialHook(AlignDevicesHook("cpu", io_same_device=True), OtherDtype()))
    assert answers(model, way) == expected


@pytest.mark.parametrize("way", [Way.PACKED, Way.MASKED_ROWS])
def test_weights_that_accelerate_fetches_for_each_call(way: Way) -> None:
    model = tiny_model("llama")
    expected = [reference(model, prompt, 6) for prompt in PROMPTS]
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.get_input_embeddings().weight.device.type == "meta"
    assert ModelForward(model, way).device.type == "cpu"
    assert answers(model, way) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_near_as_the_models_own(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    driver = PageDriver(model, Way.PACKED, 16)
    sequences = [driver.join(prompt) for prompt in PROMPTS]
    logits = driver.step([(each, len(each.prompt)) for each in sequences])
    assert logits.dtype == dtype
    assert all(layer.keys is not None and layer.keys.dtype == dtype for layer in driver.cache.layers.values())
    with torch.inference_mode():
        alone = torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])
    torch.testing.assert_close(logits.float(), alone.float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("way", [Way.PACKED, Way.ROWS])
def test_a_model_that_returns_the_logits_of_all_tokens(way: Way) -> None:
    model = tiny_model("llama")
    expected = [reference(model, prompt, 6) for prompt in PROMPTS]
    own = model.forward

    def forward(input_ids: Any, position_ids: Any = None, past_key_values: Any = None, **options: Any) -> Any:
        given = {"position_ids": position_ids, "past_key_values": past_key_values, **options}
        return own(input_ids, **given)

    model.forward = forward
    assert answers(model, way) == expected


@pytest.mark.parametrize("way", [Way.PACKED, Way.ROWS])
def test_a_model_that_keeps_a_number_of_last_logits(way: Way) -> None:
    """The model's code slices with this argument, so it must get a number rather than a tensor of positions."""
    model = tiny_model("llama")
    expected = [reference(model, prompt, 6) for prompt in PROMPTS]

    def forward(
        input_ids: Any, position_ids: Any = None, past_key_values: Any = None, logits_to_keep: int = 0, **options: Any
    ) -> Any:
        assert isinstance(logits_to_keep, int)
        given = {"position_ids": position_ids, "past_key_values": past_key_values}
        output = model.model(input_ids, **given, use_cache=True)
        return CausalLMOutputWithPast(logits=model.lm_head(output.last_hidden_state[:, -logits_to_keep:]))

    model.forward = forward
    assert answers(model, way) == expected


def test_the_logits_of_no_token_are_none() -> None:
    """A step with only middle chunks of prompts needs no logits."""
    driver = PageDriver(tiny_model("llama"), Way.PACKED, 4)
    a, b = driver.join(PROMPTS[0]), driver.join(PROMPTS[1])
    assert driver.step([(a, 2), (b, 3)], wanted={0: 0, 1: 0}).shape == (0, 259)
    assert driver.step([(a, 3), (b, 3)], wanted={1: 0}).shape == (1, 259)


def test_the_rows_of_a_tied_head_are_chosen_on_the_device_of_the_last_norm() -> None:
    """If layers are mapped to two GPUs, a tied head is on the GPU of the embedding, here a device without memory.

    A GPU refuses an index that is on another GPU.
    """
    model, seen = tiny_model("llama"), []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(given["logits_to_keep"].device), with_kwargs=True)
    head, meta = model.get_output_embeddings(), torch.device("meta")
    head.weight = torch.nn.Parameter(head.weight.to(meta))
    head._hf_hook = AlignDevicesHook(meta)
    head.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(meta),))
    driver = PageDriver(model, Way.PACKED, 16)
    sequences = [driver.join(prompt) for prompt in PROMPTS]
    for _ in range(2):  # the device is not known before the first step
        logits = driver.step([(each, 1) for each in sequences])
        assert (logits.device, logits.shape) == (meta, (len(PROMPTS), 259))
    assert seen == [torch.device("cpu")] * 2
