"""Defines attention over pages, and a batch as the tensors that it needs.

Knows no implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mlserver_torch_stream.engine.batch import Batch
from mlserver_torch_stream.engine.devices import from_host
from mlserver_torch_stream.engine.kv_cache.paged_cache import LayerPages


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """A batch on one device. ``sequences`` is the number of its sequences, ``tokens`` that of its packed tokens."""

    batch: Batch
    page_size: int
    starts: torch.Tensor  # int32 [sequences]: tokens in the cache before the step
    lengths: torch.Tensor  # int32 [sequences]: after it
    cumulative: torch.Tensor  # int32 [sequences + 1]: where each sequence's tokens begin among the packed ones
    positions: torch.Tensor  # int64 [tokens]
    tables: tuple[torch.Tensor, ...]  # int32 [sequences, most pages] of each group; 0 beyond a sequence's pages
    slots: tuple[torch.Tensor, ...]  # int64 [tokens] of each group: page * page_size + offset


def batch_tensors(batch: Batch, page_size: int, groups: int, device: torch.device) -> BatchTensors:
    """Copies the numbers of a batch to a device, without waiting for what that has to do."""
    sequences = batch.sequences
    small = torch.int32
    return BatchTensors(
        *(batch, page_size),
        from_host([each.start for each in sequences], device, small),
        from_host([each.length for each in sequences], device, small),
        from_host([0, *batch.ends], device, small),
        from_host([position for each in sequences for position in range(each.start, each.length)], device),
        tuple(from_host(_padded([each.tables[group] for each in sequences]), device, small) for group in range(groups)),
        tuple(from_host(_slots(batch, group, page_size), device) for group in range(groups)),
    )


def _padded(tables: Sequence[Sequence[int]]) -> list[list[int]]:
    width = max(map(len, tables), default=0)
    return [[*(max(0, page) for page in table), *[0] * (width - len(table))] for table in tables]


def _slots(batch: Batch, group: int, page_size: int) -> list[int]:
    return [
        each.tables[group][position // page_size] * page_size + position % page_size
        for each in batch.sequences
        for position in range(each.start, each.length)
    ]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """``window`` and ``chunk`` are those of ``LayerGroup``; ``sinks`` is ``[heads]``, a score beside those of keys."""

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class PagedAttention(Protocol):
    """Attends the packed queries ``[tokens, heads, head_dim]`` of a batch to the pages of one layer, causally.

    The keys and values of the batch's tokens are in the pages already. Returns ``[tokens, heads, value_dim]``.
    """

    def __call__(
        self, query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
    ) -> torch.Tensor: ...
