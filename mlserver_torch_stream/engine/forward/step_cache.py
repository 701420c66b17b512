"""Gives transformers' models the pages and states of one forward, as the cache that their code expects.

Knows nothing of attention: ``update`` writes to the pages, and returns what the model's attention is to see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from mlserver_torch_stream.engine.kv_cache.paged_cache import LayerPages

Seen = Callable[["PagesLayer", torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Returns the keys and values that a model's attention gets, from those of the new tokens."""


Slots = Callable[[torch.device], torch.Tensor]
"""Returns the slots of the new tokens in a layer's pages, on a device."""


class PagesLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the cache of one forward. ``columns`` is what its ``get_mask_sizes`` returns."""

    is_compileable = False

    def __init__(
        self, pages: LayerPages, slots: Slots, start: int, seen: Seen, columns: tuple[int, int], window: int | None
    ) -> None:
        super().__init__()
        self.pages = pages
        self.is_sliding = window is not None
        self.given: tuple[torch.Tensor, torch.Tensor] | None = None
        self._slots = slots
        self._start = start
        self._seen = seen
        self._columns = columns

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores ``[rows, kv_heads, tokens, head_dim]``."""
        slots = self._slots(key_states.device)
        key, value = (states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states))
        self.pages.write(key, value, slots)
        self.given = self._seen(self, key_states, value_states)
        return self.given

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._columns

    def get_seq_length(self) -> int:
        return self._start

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class StepCache(Cache):  # type: ignore[misc]
    """The cache of one forward."""

    def __init__(self, layers: list[PagesLayer | LinearAttentionLayer]) -> None:
        super().__init__(layers=layers)

    def layer_of(self, key: torch.Tensor) -> PagesLayer | None:
        """Returns the layer whose ``update`` returned this very tensor; None if there is none."""
        for layer in self.layers:
            if isinstance(layer, PagesLayer) and layer.given is not None and layer.given[0] is key:
                return layer
        return None
