"""Multiplies by the weights of linear layers with our own kernels, for models that run transformers' forward on CPUs.

The weights of each layer are packed once at load, and its forward is replaced by a product with the packed weights. The
results of each packed layer are compared with those of its own forward. The logits of the whole model are compared,
too. A linear layer does not depend on positions, so a check of the model at near positions is enough.
"""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import pad

from mlserver_torch_stream.engine.devices import input_device
from mlserver_torch_stream.engine.failures import in_a_line
from mlserver_torch_stream.engine.native import library as c
from mlserver_torch_stream.engine.native.compile_kernels import NoKernels
from mlserver_torch_stream.engine.native.groups import PANEL
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions, open_kernels
from mlserver_torch_stream.engine.native.kernel_variants import multiplies_other_bf16
from mlserver_torch_stream.engine.native.weights import DenseMatrix, Packer, in_large_pages

logger = logging.getLogger(__name__)

_CHECKED_ROWS = (1, 5, 40)
# The largest error of a layer, relative to its largest result. Two orders of summing can differ by rounding: results in
# bfloat16 keep 8 bits.
_LAYER_TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-4}
# The largest root-mean-square error of the logits, in standard deviations, by whether all parameters are in float32.
# The decoder's kernels have the same tolerance in bfloat16.
_MODEL_TOLERANCE = {True: 5e-3, False: 0.2}


def pack_linears(model: transformers.PreTrainedModel, options: KernelOptions) -> int:
    """Packs the linear layers, frees their own weights and returns their number; if a check fails, changes nothing.

    Raises LoadFailed if the environment names kernels that this CPU does not run.
    """
    layers = list(_candidates(model)) if input_device(model).type == "cpu" else []
    if not layers or (c.torch_pool() is None and options.threads > 1):  # torch's operators have more threads
        return 0
    try:
        kernels, _ = open_kernels(options.cache_dir, c.open_library)
        packed = _Packed(model, layers, Packer(kernels, options.threads))
    except (NoKernels, RuntimeError) as problem:  # torch raises RuntimeError if there is no memory
        return _refused(in_a_line(problem))
    try:
        expected = _logits(model)
        for layer in layers:
            packed.take(layer)
        error = ((_logits(model) - expected).pow(2).mean().sqrt() / expected.std()).item()
    except Exception as problem:  # of the kernels, or of a model's code that reads its weights
        packed.undo()
        return _refused(in_a_line(problem))
    tolerance = _MODEL_TOLERANCE[{each.dtype for each in model.parameters()} == {torch.float32}]
    if not error <= tolerance:
        packed.undo()
        return _refused(f"logits differ by {error:.3g} standard deviations")
    return len(layers)


def _refused(why: str) -> int:
    logger.info("linear layers are not packed: %s", why)
    return 0


def _candidates(model: nn.Module) -> Iterator[nn.Linear | transformers.Conv1D]:
    if any(hasattr(module, "_hf_hook") for module in model.modules()):  # accelerate moves these weights between devices
        return
    for module in model.modules():
        # No subclasses (quantised, sharded), and no layers whose forward was replaced.
        if type(module) not in (nn.Linear, transformers.Conv1D) or "forward" in vars(module):
            continue
        weight = module.weight
        words = weight.dtype in _LAYER_TOLERANCE and _matrix(module).shape[1] * weight.dtype.itemsize % 4 == 0
        # Where the CPU has such instructions, torch's operators may be faster with many rows.
        faster = weight.dtype == torch.bfloat16 and multiplies_other_bf16()
        plain = type(weight) is nn.Parameter and type(weight.data) is Tensor and weight.device.type == "cpu"
        if plain and words and not faster:
            yield module


def _matrix(layer: nn.Linear | transformers.Conv1D) -> Tensor:
    """Returns a layer's weight as ``[outputs, inputs]``."""
    weight = layer.weight.detach()
    return weight.t() if isinstance(layer, transformers.Conv1D) else weight


class _Packed:
    """The packed layers, and how to unpack them.

    Their own weights are freed layer by layer, so that few of them are in memory twice; their shapes stay readable.
    Weights that other modules use, such as a tied embedding, stay.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Linear | transformers.Conv1D], packer: Packer) -> None:
        owners = Counter(id(each) for module in model.modules() for each in module.parameters(recurse=False))
        self._freed = {layer for layer in layers if owners[id(layer.weight)] == 1}
        self._packer = packer
        size = sum(DenseMatrix([_matrix(layer)], layer.weight.dtype, False).bytes for layer in layers)
        self._room = in_large_pages(size, packer.kernels)
        self._taken: dict[nn.Linear | transformers.Conv1D, Tensor] = {}

    def take(self, layer: nn.Linear | transformers.Conv1D) -> None:
        """Packs a layer. Raises ArithmeticError if packing changes the layer's results, or an error of the kernels."""
        matrix = DenseMatrix([_matrix(layer)], layer.weight.dtype, False)
        panels, self._room = self._room[: matrix.bytes], self._room[matrix.bytes :]
        matrix.pack(panels, self._packer)
        forward = PackedProduct(layer, panels, self._packer.kernels)
        for rows in _CHECKED_ROWS:
            values = torch.linspace(-1, 1, rows * forward.inputs, dtype=torch.float32)
            inputs = values.view(1, rows, -1).to(forward.dtype)
            expected, got = layer.forward(inputs).float(), forward(inputs).float()
            if not (got - expected).abs().max() <= _LAYER_TOLERANCE[forward.dtype] * expected.abs().max():
                raise ArithmeticError(f"a layer of {forward.outputs} x {forward.inputs} gives other results")
        self._taken[layer] = panels
        layer.forward = forward
        if layer in self._freed:
            layer.weight = nn.Parameter(layer.weight.to("meta"), requires_grad=False)

    def undo(self) -> None:
        for layer, panels in self._taken.items():
            del layer.forward
            if layer in self._freed:
                outputs, inputs = _matrix(layer).shape
                dtype = layer.weight.dtype
                words = panels.view(torch.int32).view(-1, inputs * dtype.itemsize // 4, PANEL).transpose(1, 2)
                weight = words.contiguous().view(dtype).flatten(0, 1)[:outputs]
                weight = weight.t().contiguous() if isinstance(layer, transformers.Conv1D) else weight
                layer.weight = nn.Parameter(weight, requires_grad=False)


class PackedProduct:
    """The forward of a linear layer with packed weights. It runs on the threads of torch's operators."""

    def __init__(self, layer: nn.Linear | transformers.Conv1D, panels: Tensor, kernels: ctypes.CDLL) -> None:
        """``panels`` are the packed weights; the kernels read them in place."""
        self.outputs, self.inputs = _matrix(layer).shape
        self.dtype = layer.weight.dtype
        bias = None if layer.bias is None else pad(layer.bias.detach().float(), (0, -self.outputs % PANEL))
        self._kept = panels, bias
        run = c.KernelRun(panels.data_ptr(), self.outputs, DenseMatrix.number)
        self._matrix = ctypes.byref(c.KernelMatrix.of(self.inputs, run, bias=None if bias is None else bias.data_ptr()))
        self._is_bf16 = self.dtype == torch.bfloat16
        self._multiply = kernels.native_multiply
        self._pool = c.torch_pool()

    def __call__(self, inputs: Tensor) -> Tensor:
        if inputs.dtype != self.dtype or not inputs.is_cpu or inputs.shape[-1] != self.inputs:
            given = f"{list(inputs.shape)} in {inputs.dtype} on {inputs.device}"
            raise ValueError(f"a layer with {self.inputs} inputs in {self.dtype} was given {given}")
        inputs = inputs.contiguous()
        out = inputs.new_empty((*inputs.shape[:-1], self.outputs))
        self._multiply(
            *(self._matrix, inputs.data_ptr(), inputs.numel() // self.inputs, out.data_ptr(), self._is_bf16),
            *(self._pool, torch.get_num_threads()),
        )
        return out


def _logits(model: transformers.PreTrainedModel) -> Tensor:
    """Returns the float32 logits ``[tokens, vocabulary]`` of a few tokens, computed in one call."""
    ids = torch.tensor([[(7 * i) % 97 + 1 for i in range(9)]]) % model.get_input_embeddings().weight.shape[0]
    logits: Tensor = model(ids, use_cache=False, return_dict=True).logits[0].float()
    return logits
