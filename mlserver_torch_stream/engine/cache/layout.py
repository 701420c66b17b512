"""Reads the kinds of a model's cache layers from its config, as transformers' own cache does."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from mlserver_torch_stream.engine.cache.pages import CacheSpec, LayerGroup
from mlserver_torch_stream.engine.failures import Unsuitable

# Layers with both states and attention. transformers has the sliding variants since 5.20.
_HYBRID = tuple(
    getattr(cache_utils, name)
    for name in ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
    if hasattr(cache_utils, name)
)
_KNOWN = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, *_HYBRID)


class UnsupportedCache(Unsuitable):
    """Raised for a model with a cache layer that cannot be batched here; the serial batcher serves such models."""


class CacheLayout:
    """The layout of a model's cache: which layers keep states, which layers keep keys and values, and their windows."""

    def __init__(self, config: PreTrainedConfig) -> None:
        try:
            self._layers = DynamicCache(config=config).layers
        except (AttributeError, KeyError) as error:
            what = f"{type(error).__name__}: {error}"
            raise UnsupportedCache(f"transformers cannot make a cache from the model's config ({what})") from error
        text = config.get_text_config(decoder=True)
        self._kinds = list(getattr(text, "layer_types", None) or ())
        self._chunk = getattr(text, "attention_chunk_size", None)
        for layer in self._layers:
            if type(layer) not in _KNOWN and isinstance(layer, CacheLayerMixin | LinearAttentionLayer):
                raise UnsupportedCache(f"cache layers of type {type(layer).__name__} cannot be batched")

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def has_states(self) -> bool:
        """Whether some layers keep one state per sequence instead of a key per token, as Mamba's layers do."""
        return any(True for _ in self.state_layers())

    @property
    def windows(self) -> list[int | None]:
        """The window or chunk of each attention layer in tokens; None means that the layer sees all tokens."""
        layers = (layer for layer in self._layers if isinstance(layer, DynamicLayer))
        return [int(layer.sliding_window) if layer.is_sliding else None for layer in layers]

    def state_layers(self) -> Iterator[tuple[int, LinearAttentionLayer]]:
        """For each layer that keeps states, yields the layer's index and an empty layer for its states."""
        for index, layer in enumerate(self._layers):
            if isinstance(layer, LinearAttentionLayer):
                plain = type(layer) is LinearAttentionLayer
                yield index, copy.deepcopy(layer) if plain else LinearAttentionLayer(layer.number_of_states)

    def spec(self, page_size: int) -> CacheSpec:
        """Returns the groups of the attention layers, without ``token_bytes``, which only a forward can determine."""
        groups: dict[tuple[int | None, int | None], list[int]] = {}
        for index, layer in enumerate(self._layers):
            if isinstance(layer, DynamicLayer):
                groups.setdefault(self._sight(index, layer), []).append(index)
        return CacheSpec(
            page_size,
            tuple(LayerGroup(tuple(layers), window, chunk) for (window, chunk), layers in groups.items()),
        )

    def _sight(self, index: int, layer: DynamicLayer) -> tuple[int | None, int | None]:
        """Returns the window and the chunk of an attention layer."""
        if not layer.is_sliding:
            return None, None
        kinds = self._kinds[index : index + 1] or ["chunked_attention"]  # transformers' default without kinds
        if self._chunk is not None and kinds == ["chunked_attention"]:
            return None, int(self._chunk)
        return int(layer.sliding_window), None
