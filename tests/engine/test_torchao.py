"""Weights of torchao.

`make test` makes it available to these tests only; otherwise the start of every server would import it.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mlserver_torch_stream.engine.loading.quantised import read_quantisation
from mlserver_torch_stream.errors import LoadFailed
from tests.engine.test_quantised import answers_of, served

CPU = (torch.device("cpu"), torch.float32)
# Not whether transformers takes it: if it is there and not taken, these tests fail.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


@pytest.mark.parametrize(
    "kind",
    ["Int8WeightOnlyConfig", {"Float8WeightOnlyConfig": {}}, {"default": {"_type": "Int8WeightOnlyConfig"}}],
    ids=["a name", "a name and arguments", "as transformers writes it"],
)
def test_its_weights_give_the_quantised_models_tokens(tiny_model: Path, kind: Any) -> None:
    if isinstance(kind, dict) and "default" in kind:
        from torchao.core.config import config_to_dict
        from torchao.quantization import Int8WeightOnlyConfig

        kind = {"default": config_to_dict(Int8WeightOnlyConfig())}
    config = {"quant_method": "torchao", "quant_type": kind}
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model, quantization_config=read_quantisation(config, *CPU), dtype=torch.float32
    ).eval()
    assert "quantised by torchao" in served(tiny_model, config, answers_of(model))


@pytest.mark.parametrize(
    ("quant_type", "says"),
    [
        ("Int8WeightOnly", r"quant_type: unknown 'Int8WeightOnly'; did you mean 'Int8WeightOnlyConfig'\?"),
        ("Int4WeightOnlyConfig", r"quant_type: Int4WeightOnlyConfig does not work on cpu in float32: "),
        ("Float8DynamicActivationFloat8WeightConfig", r"does not work on cpu .* requires CUDA compute capability"),
        ({"Int8WeightOnlyConfig": {"parrot": 1}}, r"Int8WeightOnlyConfig does not work .* 'parrot'"),
        ({"a": {}, "b": {}}, r"quant_type: must be the name of a torchao config"),
        (None, r"quant_type: must be the name of a torchao config"),
    ],
)
def test_what_it_cannot_do_here_is_refused_by_name(quant_type: Any, says: str) -> None:
    with pytest.raises(LoadFailed, match=says):
        read_quantisation({"quant_method": "torchao", "quant_type": quant_type}, *CPU)
