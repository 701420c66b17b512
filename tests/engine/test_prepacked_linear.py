"""Linear layers in a layout for the CPU: the model's logits, no second copy of the weights, or no change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.forward import prepacked_linear
from mlserver_torch_stream.engine.forward.prepacked_linear import pack_linears
from tests.engine.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 products"
)
READ_THEIR_WEIGHTS = ("jamba",)  # which a packed layer no longer has
_IDS = torch.tensor([[7, 30, 99, 12, 250, 3, 41, 77, 5, 8, 61]])


def bf16(family: str, **changes: Any) -> PreTrainedModel:
    return tiny_model(family, **changes).to(torch.bfloat16)


def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(_IDS, use_cache=False).logits[0].float()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_near_to_float32_as_before(family: str) -> None:
    model = bf16(family)
    with torch.inference_mode():
        exact, before = logits(copy.deepcopy(model).float()), logits(model)
        taken = pack_linears(model)
        after = logits(model)
    linears = sum(type(module) is nn.Linear for module in model.modules())
    assert taken == (0 if family in READ_THEIR_WEIGHTS else linears)
    assert (after - exact).pow(2).mean() <= 1.2 * (before - exact).pow(2).mean() + 1e-6 * exact.var()


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_nobody_else_has_are_given_back(tied: bool) -> None:
    model = bf16("phi3", tie_word_embeddings=tied)
    with torch.inference_mode():
        assert pack_linears(model)
    on = {name: parameter.device.type for name, parameter in model.named_parameters()}
    assert on["model.embed_tokens.weight"] == "cpu"
    assert on["model.layers.0.mlp.down_proj.weight"] == "meta"
    assert model.lm_head.weight.device.type == ("cpu" if tied else "meta")


def test_a_model_that_looks_at_its_weights_stays_as_it_was() -> None:
    model = bf16("phi3")
    layer = model.model.layers[0].mlp.down_proj
    layer.register_forward_pre_hook(lambda module, given: (given[0] * module.weight.sum().sign(),))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.inference_mode():
        expected = logits(model)
        assert pack_linears(model) == 0
        assert torch.equal(logits(model), expected)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_cannot_do_without_a_cache_stays_as_it_was() -> None:
    model = bf16("phi3")
    own = model.forward

    def forward(*args: Any, use_cache: bool = True, **kwargs: Any) -> Any:
        if not use_cache:
            raise TypeError("this model's code needs its cache")
        return own(*args, **kwargs)

    model.forward = forward
    with torch.inference_mode():
        assert pack_linears(model) == 0
    assert model.model.layers[0].mlp.down_proj.weight.device.type == "cpu"


def test_a_layer_that_computes_something_else_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bf16("phi3")
    right = prepacked_linear._linear
    monkeypatch.setattr(prepacked_linear, "_linear", lambda weight, bias, given: right(weight, bias, given) * 1.1)
    with torch.inference_mode():
        expected = logits(model)
        assert pack_linears(model) == 0
        assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("what", ["float32", "a layer with a forward of its own", "hooks of accelerate"])
def test_what_is_not_ours_is_left_alone(what: str) -> None:
    model = tiny_model("phi3") if what == "float32" else bf16("phi3")
    own = model.model.layers[1].mlp.down_proj
    if what == "a layer with a forward of its own":
        own.forward = nn.Linear.forward.__get__(own)
    if what == "hooks of accelerate":
        own._hf_hook = object()
    with torch.inference_mode():
        taken = pack_linears(model)
    assert bool(taken) == (what == "a layer with a forward of its own")
    assert own.weight.device.type == "cpu"
