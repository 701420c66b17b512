"""Gives one call of a transformers model its cache over pages, its attention and its masks.

Knows nothing of the model's arguments, nor of how a batch is divided into calls.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from mlserver_torch_stream.engine.attention.paged_attention import (
    AttentionOptions,
    BatchTensors,
    PagedAttention,
    PageWriter,
    batch_tensors,
)
from mlserver_torch_stream.engine.attention.registered import CannotPage
from mlserver_torch_stream.engine.batch import Batch
from mlserver_torch_stream.engine.forward.latent_pages import expanded, has_latents
from mlserver_torch_stream.engine.forward.step_cache import HybridLayer, MovedCache, PagesLayer, SeenTokens, StepCache
from mlserver_torch_stream.engine.kv_cache.paged_cache import PagedCache

_CPU = torch.device("cpu")


class Way(str, Enum):
    """How a model takes the tokens of a batch."""

    PACKED = "packed"
    ROWS = "rows"
    MASKED_ROWS = "rows with masks"


TensorsOn = Callable[[torch.device], BatchTensors]
"""Returns a batch as tensors on a device."""


class ModelStep:
    """One call of a model: its cache, its attention and its masks."""

    def __init__(
        self,
        batch: Batch,
        cache: PagedCache,
        way: Way,
        attention: PagedAttention,
        write: PageWriter,
        on: TensorsOn | None = None,
        moved: int | None = None,
    ) -> None:
        """``on``: the batch's tensors by device, if they have been made already. ``moved``: see ``MovedCache``."""
        self.batch = batch
        self._pages = cache
        self._way = way
        self._attention = attention
        self._write = write
        self._tensors: dict[torch.device, BatchTensors] = {}
        self.on = on or self._copied
        self._longest = max(each.length for each in batch.sequences)
        self._states = self._take_states()
        layers = [self._layer(index) for index in range(len(cache.layout))]
        self.cache = StepCache(layers) if moved is None else MovedCache(layers, moved)

    def _layer(self, index: int) -> object:
        pages, states = self._pages.layers.get(index), self._states.get(index)
        if pages is None:
            return _NoLayer() if states is None else states
        span = self._pages.groups[pages.group].span
        start = max(each.start for each in self.batch.sequences)
        if self._way is Way.PACKED:
            start = SeenTokens.of(start, lambda device: self.on(device).positions)
        store = self._store_and_gather if self._way is Way.MASKED_ROWS else self._store
        own = (pages, store, start, self._columns(span), span is not None)
        return PagesLayer(*own) if states is None else HybridLayer(states, *own)

    def _copied(self, device: torch.device) -> BatchTensors:
        if device not in self._tensors:
            if device == _CPU:
                self._tensors[device] = batch_tensors(
                    self.batch, self._pages.page_size, len(self._pages.groups), device
                )
            else:
                self._tensors[device] = self._copied(_CPU).to(device)
        return self._tensors[device]

    # --- states ---

    def _take_states(self) -> dict[int, Any]:
        if self._pages.states is None:
            return {}
        if self.batch.sequences[0].start == 0:
            return self._pages.states.fresh()
        return self._pages.states.take([each.state_slot for each in self.batch.sequences])

    def keep_states(self) -> None:
        if self._pages.states is not None:
            states = {index: self.cache.layers[index] for index in self._states}
            self._pages.states.put([each.state_slot for each in self.batch.sequences], states)

    # --- attention over pages ---

    def _store(self, layer: PagesLayer, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self.on(key.device).slots[layer.pages.group]
        self._write(layer.pages, key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1), slots)
        return key, value

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        latent = has_latents(module)
        layer = self.cache.layers[module.layer_idx] if latent else self.cache.layer_of(key)
        if not isinstance(layer, PagesLayer) or layer.pages.keys is None:
            raise CannotPage("an attention's keys are not those of a cache layer")
        group = self._pages.groups[layer.pages.group]
        rows, heads, tokens, dim = query.shape
        device = layer.pages.keys.device  # another one than the query's where layers share keys
        pages, batch = layer.pages, self.on(device)
        if latent:
            pages, batch = expanded(module, pages, batch)
        given = AttentionOptions(
            scale=dim**-0.5 if scaling is None else scaling,
            window=_narrower(sliding_window, group.window) if group.chunk is None else None,
            chunk=group.chunk,
            softcap=softcap,
            sinks=None if s_aux is None else s_aux.to(device),
        )
        packed = query.transpose(1, 2).reshape(rows * tokens, heads, dim).to(device)
        output = self._attention(packed, pages, batch, given).to(query.device)
        return output.reshape(rows, tokens, heads, -1)

    # --- attention by masks ---

    def _columns(self, span: int | None) -> tuple[int, int]:
        """Returns how many positions a layer shows of each row, and the first one. Short rows are padded at left."""
        shown = self._longest
        if span is not None:
            shown = min(shown, span - 1 + max(each.count for each in self.batch.sequences))
        return shown, self._longest - shown

    def mask(self, device: torch.device) -> torch.Tensor | None:
        """Returns ``[rows, positions]``, 0 where a row is padded at its left; None if no row is."""
        if all(each.length == self._longest for each in self.batch.sequences):
            return None
        lengths = self.on(device).lengths
        return (torch.arange(self._longest, device=device) >= (self._longest - lengths)[:, None]).long()

    def _store_and_gather(
        self, layer: PagesLayer, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``[rows, kv_heads, positions, head_dim]`` with zeros where a row is padded."""
        self._store(layer, key, value)
        group, tensors = layer.pages.group, self.on(key.device)
        if ("columns", group) not in tensors.memo:
            tensors.memo["columns", group] = self._shown(group, tensors)
        slots, hidden = tensors.memo["columns", group]
        keys, values = layer.pages.gather(slots)
        return keys.masked_fill_(hidden, 0), values.masked_fill_(hidden, 0)

    def _shown(self, group: int, tensors: BatchTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the slots of the positions that a group shows, ``[rows, positions]``, and where they are padded."""
        shown, _ = self._columns(self._pages.groups[group].span)
        oldest = [self._pages.groups[group].oldest_seen(each.start) for each in self.batch.sequences]
        first = torch.tensor(oldest, device=tensors.positions.device)[:, None]  # older pages are given back
        last = tensors.lengths[:, None].long() - 1
        places = last - torch.arange(shown - 1, -1, -1, device=last.device)
        held = torch.minimum(torch.maximum(places, first), last)
        pages = tensors.tables[group].gather(1, held // self._pages.page_size).long()
        return pages * self._pages.page_size + held % self._pages.page_size, (places < first)[:, None, :, None]


def _narrower(window: int | None, other: int | None) -> int | None:
    return window if other is None else other if window is None else min(window, other)


class _NoLayer:
    """Stands for a layer of transformers' cache that holds nothing."""
