"""Defines the interface of attention over pages, and the form in which it gets a batch as tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from mlserver_torch_stream.engine.cache.paged_cache import LayerPages
from mlserver_torch_stream.engine.cache.pages import Batch
from mlserver_torch_stream.engine.devices import sent


@dataclass(frozen=True, slots=True, eq=False)
class BatchTensors:
    """A batch as tensors on one device, with one entry for each sequence or for each packed token.

    ``memo`` is for values that an attention computes once for all layers of the batch.
    """

    batch: Batch
    page_size: int
    starts: torch.Tensor  # int32 [sequences]: tokens in the cache before the step
    lengths: torch.Tensor  # int32 [sequences]: tokens in the cache after the step
    cumulative: torch.Tensor  # int32 [sequences + 1]: where each sequence's tokens begin among the packed ones
    positions: torch.Tensor  # int64 [tokens]
    tables: tuple[torch.Tensor, ...]  # int32 [sequences, most pages] of each group; 0 where there is no page
    slots: tuple[torch.Tensor, ...]  # int64 [tokens] of each group: page * page_size + offset
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def to(self, device: torch.device) -> BatchTensors:
        """Returns a copy of the batch on another device, without waiting until the copy is complete."""
        starts, lengths, cumulative, positions = (
            sent(tensor, device) for tensor in (self.starts, self.lengths, self.cumulative, self.positions)
        )
        tables, slots = (tuple(sent(tensor, device) for tensor in tensors) for tensors in (self.tables, self.slots))
        return BatchTensors(self.batch, self.page_size, starts, lengths, cumulative, positions, tables, slots)


def batch_tensors(batch: Batch, page_size: int, groups: int, device: torch.device) -> BatchTensors:
    """Returns a batch as tensors on a device."""
    sequences = batch.sequences
    starts = np.array([each.start for each in sequences], np.int64)
    counts = np.array([each.count for each in sequences], np.int64)
    ends = np.cumsum(counts)
    rows = np.repeat(np.arange(len(sequences)), counts)
    positions = np.arange(len(rows)) + np.repeat(starts - (ends - counts), counts)
    entries, offsets = np.divmod(positions, page_size)
    tables, slots = [], []
    for group in range(groups):
        table = _padded([each.tables[group] for each in sequences])
        pages = table[rows, entries]
        assert (pages >= 0).all(), "a new token has no page"
        slots.append(torch.from_numpy(pages * page_size + offsets))
        tables.append(torch.from_numpy(np.maximum(table, 0).astype(np.int32)))
    first, last, packed = (torch.from_numpy(each.astype(np.int32)) for each in (starts, starts + counts, ends))
    cumulative = torch.nn.functional.pad(packed, (1, 0))
    on_host = BatchTensors(
        *(batch, page_size, first, last, cumulative, torch.from_numpy(positions), tuple(tables), tuple(slots))
    )
    return on_host if device.type == "cpu" else on_host.to(device)


def packed_ids(batch: Batch, device: torch.device) -> torch.Tensor:
    """Returns the ids of the new tokens, int64 ``[tokens]``."""
    ids = chain.from_iterable(each.token_ids for each in batch.sequences)
    return sent(torch.from_numpy(np.fromiter(ids, np.int64, batch.tokens)), device)


def _padded(tables: Sequence[Sequence[int]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    padded = np.full((len(tables), max(map(len, tables), default=0)), -1, np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """The options of an attention call.

    ``window`` and ``chunk`` say which keys a query sees, as in ``LayerGroup``.

    ``sinks`` ``[heads]`` is an additional score in each head's softmax.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def oldest_seen(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the position of the oldest key that the query at each position sees."""
        if self.window is not None:
            return (positions - self.window + 1).clamp(min=0)
        if self.chunk is not None:
            return positions // self.chunk * self.chunk
        return torch.zeros_like(positions)

    def first_seen(self, position: int) -> int:
        """Returns the position of the oldest key that the query at this position sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return 0 if self.chunk is None else position // self.chunk * self.chunk


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes, the dtype and the options of an attention call."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @classmethod
    def of(cls, query: torch.Tensor, layer: LayerPages, options: AttentionOptions) -> AttentionShape:
        """Returns the shape of a call: ``query`` ``[tokens, heads, key_dim]`` over the pages of ``layer``."""
        assert layer.keys is not None and layer.values is not None
        dims = (query.shape[1], layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
        sight = (options.window, options.chunk, options.softcap)
        return cls(*dims, query.dtype, options.scale, *sight, options.sinks is not None)


class PagedAttention(Protocol):
    """Computes causal attention of a batch's packed queries ``[tokens, heads, head_dim]`` over the pages of one layer.

    The keys and values of the batch's tokens are already in the pages. All tensors are on one device. After a
    sequence's last token the pages can contain anything, even NaN. Returns ``[tokens, heads, value_dim]``. Several
    threads may call this at the same time.
    """

    name: ClassVar[str]  # in a word, for metadata and metrics
    page_multiple: ClassVar[int] = 1  # the page size must be a multiple of this many tokens

    def __call__(
        self, query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
    ) -> torch.Tensor:
        """Returns the attention's output, ``[tokens, heads, value_dim]``, in the dtype of ``query``."""

    def write(self, layer: LayerPages, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores keys and values in the same places as ``layer.write``."""
        layer.write(key, value, slots)

    def refusal(self, query: torch.Tensor, layer: LayerPages, options: AttentionOptions) -> str | None:
        """Returns why this attention cannot compute such a layer; None if it can.

        Torch's operators compute refused layers.
        """
        return None

    def describe(self) -> str:
        """Returns a longer name with remarks, for the summary that is logged after a load."""
        ...
