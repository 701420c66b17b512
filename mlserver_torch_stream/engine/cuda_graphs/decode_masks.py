"""Makes the attention masks of one decode step, for rows that are aligned at their newest token.

Knows nothing of layers; a mask depends on the number of columns that a layer shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mlserver_torch_stream.engine.devices import from_host


class DecodeMasks:
    """The masks on one device: one for all full layers, and one for each width of a sliding window."""

    def __init__(self, lengths: Sequence[int], device: torch.device, added: torch.dtype | None) -> None:
        """``lengths`` are those of the rows before this step; ``added`` is that of ``CapturedStep``."""
        self._lengths = lengths
        self._device = device
        self._added = added
        self._made: dict[int, torch.Tensor | None] = {}

    def over(self, columns: int) -> torch.Tensor | None:
        """Returns ``[rows, 1, 1, columns]``: false, or the smallest number, where a row is padded. None: no padding."""
        if columns not in self._made:
            padded = min(self._lengths) < columns - 1
            self._made[columns] = self._make(columns) if padded else None
        return self._made[columns]

    def _make(self, columns: int) -> torch.Tensor:
        firsts = from_host([[columns - 1 - length] for length in self._lengths], self._device)
        seen = (torch.arange(columns, device=self._device) >= firsts)[:, None, None, :]
        if self._added is None:
            return seen
        least = torch.finfo(self._added).min
        return torch.zeros_like(seen, dtype=self._added).masked_fill_(~seen, least)
