"""Provides the cache over pages, the attention and the masks for one call of a transformers model."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from mlserver_torch_stream.engine.attention.paged_attention import (
    AttentionOptions,
    BatchTensors,
    PagedAttention,
    batch_tensors,
)
from mlserver_torch_stream.engine.attention.registered import CannotPage
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages, PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch

Store = Callable[["PagesLayer", torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A callable that writes the keys and values of new tokens, and returns the keys and values that attention reads."""


_MASKING = "transformers.masking_utils"  # by its name: importing it would import torch's compiler

Positions = Callable[[torch.device], torch.Tensor]
"""Returns the positions ``[tokens]`` of a packed row's tokens, on a device."""


class SeenTokens(int):
    """How many cached tokens a model sees before a packed row: the maximum over the row's sequences.

    Some models, such as Llama 4, compute positions by adding this number to the indices of the row's tokens. This class
    changes the addition so that the result is the correct position of each token.
    """

    positions: Positions

    @classmethod
    def of(cls, number: int, positions: Positions) -> SeenTokens:
        made = cls(number)
        made.positions = positions
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.__name__ == "add" and len(args) == 2 and not kwargs:
            places, seen = args
            if isinstance(places, torch.Tensor) and isinstance(seen, SeenTokens):
                positions = seen.positions(places.device)
                if places.shape[-1:] == positions.shape:
                    return places + (positions - torch.arange(len(positions), device=places.device))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class PagesLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a cache that serves one forward. ``columns`` is what its ``get_mask_sizes`` returns."""

    is_compileable = False

    def __init__(self, pages: LayerPages, store: Store, start: int, columns: tuple[int, int], sliding: bool) -> None:
        super().__init__()
        self.pages = pages
        self.is_sliding = sliding
        self._store = store
        self._start = start
        self._columns = columns
        self._newest_key: Callable[[], torch.Tensor | None] = lambda: None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores ``[rows, kv_heads, tokens, head_dim]``."""
        pair = self._store(self, key_states, value_states)
        self._newest_key = weakref.ref(pair[0])
        return pair

    def gave(self, key: torch.Tensor) -> bool:
        """Returns whether this tensor is the one that ``update`` returned."""
        return self._newest_key() is key

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._columns

    def get_seq_length(self) -> int:
        return self._start

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class HybridLayer(LinearAttentionLayer, PagesLayer):  # type: ignore[misc]
    """A layer with both states and attention."""

    is_compileable = False

    def __init__(self, states: LinearAttentionLayer, *pages: Any) -> None:
        PagesLayer.__init__(self, *pages)
        self.__dict__.update(vars(states))


class StepCache(Cache):  # type: ignore[misc]
    """The cache of one forward."""

    def __init__(self, layers: Iterable[object]) -> None:
        super().__init__(layers=list(layers))
        self._pages = [layer for layer in self.layers if isinstance(layer, PagesLayer)]
        self._newest = 0

    @property
    def is_linear(self) -> list[bool]:
        """Says for each layer whether it has no keys; transformers makes masks for the first layer with keys."""
        return [not isinstance(each, PagesLayer) for each in self.layers]

    def layer_of(self, key: torch.Tensor) -> PagesLayer | None:
        """Returns the layer whose ``update`` returned this tensor itself; None if there is no such layer.

        Layers are called in order, so the search begins with the layer that was found last, then tries the next layer.
        """
        count = len(self._pages)
        for step in range(count):
            number = (self._newest + step) % count
            if self._pages[number].gave(key):
                self._newest = number
                return self._pages[number]
        return None


class MovedCache(StepCache):
    """A cache that reports more tokens than it has to every caller except transformers' code for masks.

    The cache also records whether such a caller has asked. It shows whether a model's logits depend on the longest
    sequence of a batch.
    """

    def __init__(self, layers: Iterable[object], more: int) -> None:
        super().__init__(layers)
        self.was_read = False
        self._more = more

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._moved(super().get_seq_length(layer_idx))

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._moved(super().get_seq_length(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        return length, self._moved(offset)

    def _moved(self, number: int) -> int:
        if _asker() == _MASKING:
            return number
        self.was_read = True
        moved = number + self._more
        return SeenTokens.of(moved, number.positions) if isinstance(number, SeenTokens) else moved


def _asker() -> str | None:
    """Returns the name of the module whose code asked the cache, which is three frames up."""
    frame = inspect.currentframe()
    for _ in range(3):
        frame = None if frame is None else frame.f_back
    return None if frame is None else frame.f_globals.get("__name__")


def has_latents(module: nn.Module) -> bool:
    """Returns whether an attention layer caches latents, as MLA does; ``expand_kv`` turns them into keys and values."""
    return hasattr(module, "expand_kv") and isinstance(getattr(module, "layer_idx", None), int)


def expanded(module: nn.Module, layer: LayerPages, batch: BatchTensors) -> tuple[LayerPages, BatchTensors]:
    """Returns the batch's pages, expanded to keys and values of all heads, and the batch with tables of these pages."""
    assert layer.keys is not None and layer.values is not None
    key = ("pages of latents", layer.group)
    if key not in batch.memo:
        batch.memo[key] = _renumbered(batch, layer.group)
    used, own = batch.memo[key]
    keys, values = module.expand_kv(layer.keys[used], layer.values[used])
    return LayerPages(layer.group, len(used), layer.page_size, keys.contiguous(), values.contiguous()), own


def _renumbered(batch: BatchTensors, group: int) -> tuple[torch.Tensor, BatchTensors]:
    """Returns the pages that a batch uses, and the batch with block tables that number these pages from 0."""
    used, places = torch.unique(batch.tables[group], return_inverse=True)
    rows = places.tolist()
    sequences = tuple(
        replace(each, tables=_with(each.tables, group, row[: len(each.tables[group])]))
        for each, row in zip(batch.batch.sequences, rows, strict=True)
    )
    tables = _with(batch.tables, group, places.int())
    return used.long(), replace(batch, batch=Batch(sequences), tables=tables, memo={})


def _with(items: tuple, index: int, item: object) -> tuple:  # type: ignore[type-arg]
    return (*items[:index], item, *items[index + 1 :])


_CPU = torch.device("cpu")


class Way(str, Enum):
    """The form in which a model gets the tokens of a batch."""

    PACKED = "packed"
    ROWS = "rows"
    MASKED_ROWS = "rows with masks"


class ModelStep:
    """One call of a model: its cache, its attention and its masks."""

    def __init__(
        self,
        batch: Batch,
        cache: PagedCache,
        way: Way,
        attention: PagedAttention,
        moved: int | None = None,
    ) -> None:
        """``moved`` is passed to ``MovedCache``."""
        self.batch = batch
        self._pages = cache
        self._way = way
        self._attention = attention
        self._tensors: dict[torch.device, BatchTensors] = {}
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

    def on(self, device: torch.device) -> BatchTensors:
        """Returns the batch as tensors on a device."""
        if device not in self._tensors:
            if device == _CPU:
                self._tensors[device] = batch_tensors(
                    self.batch, self._pages.page_size, len(self._pages.groups), device
                )
            else:
                self._tensors[device] = self.on(_CPU).to(device)
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
        keys, values = (part.transpose(1, 2).flatten(0, 1) for part in (key, value))
        self._attention.write(layer.pages, keys, values, slots)
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
            raise CannotPage("an attention layer reads keys that are in no cache layer")
        group = self._pages.groups[layer.pages.group]
        rows, heads, tokens, dim = query.shape
        device = layer.pages.keys.device  # not always the query's device: layers may share keys
        pages, batch = layer.pages, self.on(device)
        if latent:
            pages, batch = expanded(module, pages, batch)
        attention_options = AttentionOptions(
            scale=dim**-0.5 if scaling is None else scaling,
            window=_narrower(sliding_window, group.window) if group.chunk is None else None,
            chunk=group.chunk,
            softcap=softcap,
            sinks=None if s_aux is None else s_aux.to(device),
        )
        packed = query.transpose(1, 2).reshape(rows * tokens, heads, dim).to(device)
        output = self._attention(packed, pages, batch, attention_options).to(query.device)
        return output.reshape(rows, tokens, heads, -1)

    # --- attention by masks ---

    def _columns(self, span: int | None) -> tuple[int, int]:
        """Returns how many positions of each row a layer returns, and the first of these positions.

        Shorter rows are padded on the left.
        """
        shown = self._longest
        if span is not None:
            shown = min(shown, span - 1 + max(each.count for each in self.batch.sequences))
        return shown, self._longest - shown

    def mask(self, device: torch.device) -> torch.Tensor | None:
        """Returns a mask ``[rows, positions]``, which is 0 where a row is padded on the left; None without padding."""
        if all(each.length == self._longest for each in self.batch.sequences):
            return None
        lengths = self.on(device).lengths
        return (torch.arange(self._longest, device=device) >= (self._longest - lengths)[:, None]).long()

    def _store_and_gather(
        self, layer: PagesLayer, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the new keys and values.

        Returns the keys and values that the rows see, each ``[rows, kv_heads, positions, head_dim]``, padded with
        zeros.
        """
        self._store(layer, key, value)
        group, tensors = layer.pages.group, self.on(key.device)
        if ("columns", group) not in tensors.memo:
            tensors.memo["columns", group] = self._shown(group, tensors)
        slots, hidden = tensors.memo["columns", group]
        keys, values = layer.pages.gather(slots)
        return keys.masked_fill_(hidden, 0), values.masked_fill_(hidden, 0)

    def _shown(self, group: int, tensors: BatchTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the slots ``[rows, positions]`` whose outputs a group returns, and a mask of the padding."""
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
    """Replaces a layer that holds nothing in transformers' cache."""
