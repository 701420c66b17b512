"""Reorders the weights of linear layers once, as oneDNN needs them, for models in bfloat16 on CPUs.

Packing is for models that our own kernels do not support. With 16 rows, a packed layer of a small model takes a third
of the time of ``F.linear``, which reorders the weights in each call (benchmarks/LOG.md). The packed operators are
private to torch. So the results of each packed layer are compared with the results of ``F.linear``. The logits of the
whole model are compared, too, before its own weights are freed. A linear layer does not depend on positions, so a check
of the model at near positions is enough.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from functools import partial

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from mlserver_torch_stream.engine.devices import input_device
from mlserver_torch_stream.engine.failures import in_a_line

logger = logging.getLogger(__name__)

# The number of rows that the layout is made for; measured to be good from 1 to 512 rows.
_ROWS = 16
_CHECKED_ROWS = (1, 5, 40)
# Two orders of summing bfloat16 products in float32 can differ by rounding: the result is bfloat16, which keeps 8 bits.
_LAYER_TOLERANCE = 0.02
# The largest root-mean-square error of the logits, in standard deviations: the same as for our own kernels.
_MODEL_TOLERANCE = 0.2


def pack_linears(model: transformers.PreTrainedModel) -> int:
    """Packs the linear layers, frees their own weights and returns their number; if a check fails, changes nothing."""
    if input_device(model).type != "cpu" or not torch.backends.mkldnn.is_available():
        return 0
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return 0
    layers = list(_candidates(model))
    if not layers:
        return 0
    packed = _Packed()
    try:
        expected = _logits(model)
        for layer in layers:
            packed.take(layer)
        packed.release(model)
        error = ((_logits(model) - expected).pow(2).mean().sqrt() / expected.std()).item()
    except Exception as problem:  # private operators, or a model's code that reads its weights
        return _refused(packed, in_a_line(problem))
    if not error <= _MODEL_TOLERANCE:
        return _refused(packed, f"logits differ by {error:.3g} standard deviations")
    return len(layers)


def _refused(packed: _Packed, why: str) -> int:
    packed.undo()
    logger.info("linear layers are not repacked: %s", why)
    return 0


def _candidates(model: nn.Module) -> Iterator[nn.Linear]:
    if any(hasattr(module, "_hf_hook") for module in model.modules()):  # accelerate moves these weights between devices
        return
    for module in model.modules():
        # No subclasses (quantised, sharded), and no layers whose forward was replaced.
        if type(module) is nn.Linear and type(module.weight) is nn.Parameter and "forward" not in vars(module):
            weight = module.weight
            if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and type(weight.data) is Tensor:
                yield module


class _Packed:
    """The packed layers, and how to unpack them."""

    def __init__(self) -> None:
        self._taken: list[tuple[nn.Linear, Tensor]] = []
        self._released: list[tuple[nn.Linear, Tensor]] = []

    def take(self, layer: nn.Linear) -> None:
        """Packs a layer.

        Raises ArithmeticError if packing changes the layer's results, or an error of the operators.
        """
        weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS)
        forward = partial(_linear, weight, layer.bias)
        for rows in _CHECKED_ROWS:
            inputs = torch.linspace(-1, 1, rows * layer.in_features).view(1, rows, -1).to(layer.weight.dtype)
            expected, got = F.linear(inputs, layer.weight, layer.bias).float(), forward(inputs).float()
            if not (got - expected).abs().max() <= _LAYER_TOLERANCE * expected.abs().max():
                raise ArithmeticError(f"a layer of {layer.out_features} x {layer.in_features} gives other results")
        self._taken.append((layer, weight))
        layer.forward = forward

    def release(self, model: nn.Module) -> None:
        """Frees the weights and keeps their shapes. Weights that other modules use, such as a tied embedding, stay."""
        owners = Counter(id(each) for module in model.modules() for each in module._parameters.values())
        for layer, packed in self._taken:
            if owners[id(layer.weight)] == 1:
                layer.weight = nn.Parameter(layer.weight.to("meta"), requires_grad=False)
                self._released.append((layer, packed))

    def undo(self) -> None:
        for layer, packed in self._released:
            layer.weight = nn.Parameter(packed.to_dense(), requires_grad=False)
        for layer, _ in self._taken:
            del layer.forward


def _linear(weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return result


def _logits(model: transformers.PreTrainedModel) -> Tensor:
    """Returns the float32 logits ``[tokens, vocabulary]`` of a few tokens, computed in one call."""
    ids = torch.tensor([[(7 * i) % 97 + 1 for i in range(9)]]) % model.get_input_embeddings().weight.shape[0]
    logits: Tensor = model(ids, use_cache=False, return_dict=True).logits[0].float()
    return logits
