"""Rounds weights to int8 and back: symmetric, with one scale for each output of a projection.

Knows nothing of layouts. Measured on SmolLM2-135M-Instruct (benchmarks/LOG.md): a scale per output costs 0.3 % of
perplexity, a scale per 32 inputs costs nothing. But only the former leaves integers to multiply with, which bf16 holds
exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlserver_torch_stream.engine.native.structure import Decoder, UnsupportedLayout

_LARGEST = 127
BLOCK = 512  # rows at a time: the float32 copy of a whole head may be larger than the model in int8


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``[outputs, inputs]`` in int8, and the scales in float32. Raises UnsupportedLayout."""
    exact = weight.float()
    scales = exact.abs().amax(1) / _LARGEST
    if not scales.isfinite().all():
        raise UnsupportedLayout("weights that are not finite")
    divisors = torch.where(scales > 0, scales, 1.0)
    return (exact / divisors[:, None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8), scales


def round_weights(decoder: Decoder) -> None:
    """Rounds the projections of the model itself to int8, in place and in their own dtype."""
    for projection in decoder.projections:
        for weight in projection.weights:
            for rows in weight.split(BLOCK):
                numbers, scales = quantise(rows)
                rows.copy_(numbers.float().mul_(scales[:, None]))
