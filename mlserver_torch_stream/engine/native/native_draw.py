"""Draws the tokens of rows of logits in one call of the kernels.

Knows nothing of penalties or log-probabilities, nor how the rows that stay undecided are drawn.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence

import torch

from mlserver_torch_stream.engine.native.library import KernelDrawCall
from mlserver_torch_stream.engine.sampling.row_sampler import RowSampler

_ROW = struct.Struct("=qQqdddd")  # ``DrawnRow`` of ``draw.h``


class NativeDraw:
    """A ``RowDraw`` on the threads of a decoder of the kernels.

    No forward or other draw of the decoder may run during the call.
    """

    def __init__(self, kernels: ctypes.CDLL, decoder: int) -> None:
        self._run = kernels.native_draw
        self._decoder = decoder

    def __call__(self, logits: torch.Tensor, indices: Sequence[int], rows: Sequence[RowSampler]) -> list[int]:
        packed = [
            _ROW.pack(index, row.noise_key, row.top_k, row.temperature, row.top_p, row.min_p, row.typical_p)
            for index, row in zip(indices, rows, strict=True)
        ]
        chosen = array("q", bytes(8 * len(packed)))
        call = KernelDrawCall(
            logits.data_ptr(),
            logits.stride(0),
            min(rows[0].vocab_size, logits.shape[1]),
            len(packed),
            b"".join(packed),
            chosen.buffer_info()[0],
        )
        self._run(self._decoder, ctypes.byref(call))
        return chosen.tolist()
