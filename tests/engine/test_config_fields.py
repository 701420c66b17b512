"""For any value of any field that a config declares, the kernels give the model's logits or refuse the model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from mlserver_torch_stream.engine.checks.forward_choice import take_kernels
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.config_fields import declared_fields
from mlserver_torch_stream.engine.failures import UnsupportedLayout
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.structure import read_decoder
from tests.engine.test_native import prefilled
from tests.engine.tiny import greedy, prompt_of, reference, run, running, tiny_model, tokens_of

ORIGINAL = 64  # the number of tokens beyond which positions are rescaled
FAR = 130
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
# transformers' families whose modules our kernels can take for a Llama's.
ALIKE = [
    *("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "phi3", "olmo2", "granite", "smollm3"),
    *("exaone4", "cwm", "seed_oss", "helium", "glm", "ernie4_5", "gpt_oss"),
]
# A value that changes what a model computes, by the field; with what else it needs to take effect.
CHANGES: dict[str, list[dict[str, Any]]] = {
    "hidden_act": [{"hidden_act": "gelu_pytorch_tanh"}, {"hidden_act": "relu"}],
    "rms_norm_eps": [{"rms_norm_eps": 0.5}],
    "tie_word_embeddings": [{"tie_word_embeddings": True}],
    "attention_bias": [{"attention_bias": True}],
    "attention_out_bias": [{"attention_out_bias": True}],
    "mlp_bias": [{"mlp_bias": True}],
    "use_bias": [{"use_bias": True}],
    "num_key_value_heads": [{"num_key_value_heads": 1}],
    "head_dim": [{"head_dim": 16}],
    "attention_multiplier": [{"attention_multiplier": 0.7}],
    "embedding_multiplier": [{"embedding_multiplier": 3.0}],
    "residual_multiplier": [{"residual_multiplier": 0.5}],
    "logits_scaling": [{"logits_scaling": 4.0}],
    "no_rope_layers": [{"no_rope_layers": [1, 0, 1]}],
    "swiglu_alpha": [{"swiglu_alpha": 0.9}],
    "swiglu_limit": [{"swiglu_limit": 0.4}],
    "sliding_window": [{"sliding_window": 45}, {"sliding_window": 90}],
    "use_sliding_window": [{"use_sliding_window": True, "sliding_window": 90, "max_window_layers": 1}],
    "layer_types": [{"sliding_window": 90, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}],
    "rope_parameters": [
        {"rope_parameters": _YARN},
        {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.5}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ],
}
MINISTRAL = {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}}


def built(family: str, change: dict[str, Any], ids: Sequence[int]) -> tuple[PreTrainedModel, torch.Tensor] | None:
    """Returns the changed model and its own logits after ``ids``; None if transformers cannot run such a model."""
    try:
        model = tiny_model(family, **change)
        return model, model(torch.tensor([ids]), use_cache=False).logits[0, -1]
    except (ValueError, KeyError, TypeError, RuntimeError, StrictDataclassError):
        return None


def stays_sound(family: str, change: dict[str, Any], folder: Path) -> bool:
    """Fails if the kernels run the changed model with wrong logits. Returns False if transformers cannot run it."""
    ids = prompt_of(FAR)
    with torch.inference_mode():
        sound = built(family, change, ids)
        if sound is None:
            return False
        model, expected = sound
        expected_logits = ExpectedLogits(model)
        forward = take_kernels(
            expected_logits, check_batching(model, expected=expected_logits), KernelOptions(1, folder)
        )
        if forward.candidate is not None:
            logits, _ = prefilled(forward.candidate, model, list(ids), 50)
            assert (logits - expected).abs().max() <= 1e-3 * expected.std(), change
    return True


@pytest.mark.long
@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_field_leaves_the_logits_equal_or_the_model_alone(field: str, folder: Path) -> None:
    """Changes the field in a model of the first family whose config has it and that transformers can run."""
    families = [each for each in ALIKE if field in declared_fields(CONFIG_MAPPING[each])]
    for change in CHANGES[field]:
        assert any(stays_sound(family, change, folder) for family in families)


@pytest.mark.slow
@pytest.mark.parametrize("family", ALIKE)
def test_every_changed_field_of_every_family_does(family: str, folder: Path) -> None:
    fields = declared_fields(CONFIG_MAPPING[family])
    changes = [change for field in fields for change in CHANGES.get(field, ())]
    assert sum(stays_sound(family, change, folder) for change in changes) >= 6


def test_ministral_3_gets_the_tokens_of_generate_beyond_its_original_length(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model scales its queries anew at each multiple of that length, and the kernels do not."""
    model = tiny_model("ministral3", **MINISTRAL)
    prompts = [prompt_of(length, length) for length in (20, 100, 180)]
    expected = [reference(model, prompt, 20) for prompt in prompts]
    with torch.inference_mode(), caplog.at_level(logging.INFO):
        findings = check_batching(model)
        assert "llama_4_scaling_beta 0.1" in str(
            take_kernels(ExpectedLogits(model), findings, KernelOptions(1, folder))
        )
    assert findings.problem is None
    with running(model, findings=findings) as engine:

        async def together() -> list[list[int]]:
            return await asyncio.gather(*(tokens_of(engine, prompt, greedy(20)) for prompt in prompts))

        assert run(together()) == expected


def test_ministral_3_that_scales_nothing_is_taken() -> None:
    with torch.inference_mode():
        read_decoder(tiny_model("ministral3", rope_parameters={**_YARN, "llama_4_scaling_beta": 0}))


class WithField(LlamaConfig):  # type: ignore[misc]
    """Declares a field as the configs of transformers do."""

    clip_qkv: float | None = None


class WithArgument(LlamaConfig):  # type: ignore[misc]
    """Declares a field as the config class of a checkpoint's own code may do."""

    def __init__(self, clip_qkv: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.clip_qkv = clip_qkv


@pytest.mark.parametrize("config_class", [WithField, WithArgument])
def test_a_field_that_a_config_class_declares_must_be_known_or_unset(config_class: type[LlamaConfig]) -> None:
    def model(**changes: Any) -> PreTrainedModel:
        given = {key: value for key, value in tiny_model().config.to_dict().items() if key != "model_type"}
        return LlamaForCausalLM(config_class(**{**given, "dtype": torch.float32, **changes})).eval()

    with torch.inference_mode():
        read_decoder(model())
        read_decoder(model(some_undeclared_key=7))
        with pytest.raises(UnsupportedLayout, match=r"clip_qkv 8\.0"):
            read_decoder(model(clip_qkv=8.0))


def test_a_rope_key_must_be_known() -> None:
    model = tiny_model()
    model.config.rope_parameters["temperature"] = 1.5
    with torch.inference_mode(), pytest.raises(UnsupportedLayout, match=r"temperature 1\.5"):
        read_decoder(model)


def test_layers_that_are_configured_one_by_one_are_left_alone() -> None:
    model = tiny_model()
    model.config.per_layer_config = {1: {"intermediate_size": 24}}
    with torch.inference_mode(), pytest.raises(UnsupportedLayout, match="per_layer_config"):
        read_decoder(model)
