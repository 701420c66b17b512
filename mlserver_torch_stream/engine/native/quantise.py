"""Rounds dense weights to int8 or int4, in groups of 32 inputs, and back.

The int8 format is symmetric, like GGUF's Q8_0; the int4 format has a minimum for each group, like Q4_1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from mlserver_torch_stream.engine.failures import UnsupportedLayout
from mlserver_torch_stream.engine.native.groups import EIGHT, FOUR_MIN, GROUP, GroupFormat, Groups
from mlserver_torch_stream.engine.native.structure import Decoder

BLOCK = 512  # rows at a time: a float32 copy of the whole head may be larger than the model in int8


@dataclass(frozen=True, slots=True)
class Rounding:
    """The formats to which a model's dense weights are rounded. A tied embedding has the same format as the head."""

    layers: GroupFormat
    head: GroupFormat


# By the setting ``weights``. A head in int4 costs more perplexity than all layers together (benchmarks/LOG.md).
ROUNDED = {"int8": Rounding(EIGHT, EIGHT), "int4": Rounding(FOUR_MIN, EIGHT)}


def quantise(weight: Tensor, format: GroupFormat) -> Groups:
    """Rounds a matrix ``[outputs, inputs]`` to a format of ``ROUNDED``.

    Raises UnsupportedLayout if a weight is not finite.
    """
    if not weight.isfinite().all():
        raise UnsupportedLayout("the model has weights that are not finite")
    grouped = pad(weight.float(), (0, -weight.shape[1] % GROUP)).view(len(weight), -1, GROUP)
    # The kernels hold scales and minima in float16, so the codes are computed from the values that float16 holds.
    minima = grouped.amin(2).half().float() if format.minimum else None
    most = (grouped.amax(2) - minima) / 15 if minima is not None else grouped.abs().amax(2) / 127
    scales = most.half().float()
    divisors = torch.where(scales > 0, scales, 1.0)[..., None]
    if minima is None:
        codes = (grouped / divisors).round_().clamp_(-127, 127).add_(format.offset)
    else:
        codes = ((grouped - minima[..., None]) / divisors).round_().clamp_(0, 15)
    return Groups(format, codes.to(torch.uint8).flatten(1)[:, : weight.shape[1]], scales, minima)


def round_weights(decoder: Decoder, rounding: Rounding) -> None:
    """Rounds the projections of the model itself, in place; they keep their dtype."""
    for projection in decoder.projections:
        format = rounding.head if projection is decoder.head else rounding.layers
        for weight in projection.weights:
            assert isinstance(weight, Tensor)  # the model is dense
            for rows in weight.split(BLOCK):
                rows.copy_(quantise(rows, format).dense())
