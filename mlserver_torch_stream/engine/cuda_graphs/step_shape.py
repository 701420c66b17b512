"""Defines the numbers of a captured decode step: one tensor for each device, written before each replay.

A graph holds addresses, so everything that differs from step to step is in this tensor: a row for each sequence, its
token, its position, and its block table of each group of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mlserver_torch_stream.engine.attention.paged_attention import BatchTensors
from mlserver_torch_stream.engine.batch import Batch, BatchSequence

_FIRST_TABLE = 2  # the columns before are token and position


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of ``rows`` sequences whose tables have ``width`` pages. ``spares``: for each group a page of no sequence.

    Rows that stand for no sequence have token 0 at position 0 on that page: a model may change all rows by the largest
    of their positions.
    """

    rows: int
    width: int
    page_size: int
    spares: tuple[int, ...]

    def holds(self, batch: Batch) -> bool:
        """Whether the step can compute a batch: one new token for each sequence, no more and no longer than it has."""
        return 0 < len(batch.sequences) <= self.rows and all(
            each.count == 1 and each.length <= self.width * self.page_size for each in batch.sequences
        )

    def empty(self, device: torch.device) -> torch.Tensor:
        """Returns the tensor of a step without sequences, on a device."""
        return self.numbers(()).to(device)

    def numbers(self, sequences: Sequence[BatchSequence]) -> torch.Tensor:
        """Returns the tensor on the host, int32 ``[rows, columns]``."""
        columns = _FIRST_TABLE + self.width * len(self.spares)
        numbers = np.zeros((self.rows, columns), dtype=np.int32)
        for group, spare in enumerate(self.spares):
            first = _FIRST_TABLE + group * self.width
            part = numbers[:, first : first + self.width]
            part[:] = spare
            for row, each in enumerate(sequences):
                table = each.tables[group][: self.width]
                part[row, : len(table)] = table
            part[part < 0] = spare  # a window has passed these
        for row, each in enumerate(sequences):
            numbers[row, :_FIRST_TABLE] = each.token_ids[0], each.start
        return torch.from_numpy(numbers)

    def tensors(self, numbers: torch.Tensor) -> tuple[torch.Tensor, BatchTensors]:
        """Returns the token ids and the batch of such a tensor, by operations that a device can repeat."""
        starts = numbers[:, 1].contiguous()
        positions = starts.long()
        page, offset = positions // self.page_size, positions % self.page_size
        tables = tuple(
            numbers[:, first : first + self.width].contiguous()
            for first in range(_FIRST_TABLE, numbers.shape[1], self.width)
        )
        batch = BatchTensors(
            self._largest(),
            self.page_size,
            starts=starts,
            lengths=starts + 1,
            cumulative=torch.arange(self.rows + 1, dtype=torch.int32, device=numbers.device),
            positions=positions,
            tables=tables,
            slots=tuple(table.gather(1, page[:, None])[:, 0].long() * self.page_size + offset for table in tables),
        )
        return numbers[:, 0].long(), batch

    def _largest(self) -> Batch:
        """Returns the batch whose sequences are as long as they may be: sizes of kernels are taken from it."""
        tables = tuple((spare,) * self.width for spare in self.spares)
        return Batch((BatchSequence((0,), self.width * self.page_size - 1, tables),) * self.rows)
