"""Weights to int8 and back: symmetric, with one scale for each output of a projection.

Measured on SmolLM2-135M-Instruct (benchmarks/LOG.md): a scale per output costs 0.3 % of perplexity, one per 32 inputs
nothing, but only the former leaves integers to multiply with, which bf16 holds exactly. Knows nothing of layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlserver_torch_stream.engine.native.structure import Decoder, UnsupportedLayout

_LARGEST = 127
BLOCK = 512  # rows at a time: the float32 copy of a whole head may be larger than the model in int8


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``[outputs, inputs]`` as int8, and the scales in float32. Raises Unsupported."""
    exact = weight.float()
    scales = exact.abs().amax(1) / _LARGEST
    if not scales.isfinite().all():
        raise UnsupportedLayout("weights that are not finite")
    divisors = torch.where(scales > 0, scales, 1.0)
    return (exact / divisors[:, None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8), scales


def round_weights(decoder: Decoder) -> None:
    """Gives the model itself, in place, the weights that int8 leaves of its projections."""
    projections = [decoder.head]
    for layer in decoder.layers:
        projections += [layer.qkv, layer.out, layer.gate_up, layer.down]
    for projection in projections:
        for weight in projection.weights:
            for rows in weight.split(BLOCK):
                numbers, scales = quantise(rows)
                rows.copy_(numbers.float().mul_(scales[:, None]))
