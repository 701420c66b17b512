"""Gives transformers' models the pages and states of one forward, as the cache that their code expects.

Knows nothing of attention: ``update`` writes to the pages, and returns the keys and values for the model's attention.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from transformers import masking_utils
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from mlserver_torch_stream.engine.kv_cache.paged_cache import LayerPages

Store = Callable[["PagesLayer", torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Writes the keys and values of the new tokens, and returns the keys and values that a model's attention gets."""


Positions = Callable[[torch.device], torch.Tensor]
"""Returns the positions ``[tokens]`` of a packed row's tokens, on a device."""


class SeenTokens(int):
    """The number of tokens in the cache before a packed row, of the sequence that has the most.

    Some models, such as Llama 4, add it to the places of the row's tokens to get their positions. The sum is each
    token's own position then.
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
    """One layer of the cache of one forward. ``columns`` is what its ``get_mask_sizes`` returns."""

    is_compileable = False

    def __init__(self, pages: LayerPages, store: Store, start: int, columns: tuple[int, int], sliding: bool) -> None:
        super().__init__()
        self.pages = pages
        self.is_sliding = sliding
        self._store = store
        self._start = start
        self._columns = columns
        self._given: Callable[[], torch.Tensor | None] = lambda: None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores ``[rows, kv_heads, tokens, head_dim]``."""
        given = self._store(self, key_states, value_states)
        self._given = weakref.ref(given[0])
        return given

    def gave(self, key: torch.Tensor) -> bool:
        """Returns whether ``update`` returned this very tensor."""
        return self._given() is key

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._columns

    def get_seq_length(self) -> int:
        return self._start

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class HybridLayer(LinearAttentionLayer, PagesLayer):  # type: ignore[misc]
    """A layer with states and attention both."""

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
        """Whether each layer has no keys; masks are made for the first one that has some."""
        return [not isinstance(each, PagesLayer) for each in self.layers]

    def layer_of(self, key: torch.Tensor) -> PagesLayer | None:
        """Returns the layer whose ``update`` returned this very tensor; None if there is none.

        Layers follow each other, so the search begins at the one found last and the one after it.
        """
        count = len(self._pages)
        for step in range(count):
            number = (self._newest + step) % count
            if self._pages[number].gave(key):
                self._newest = number
                return self._pages[number]
        return None


class MovedCache(StepCache):
    """A cache that names more tokens than it holds, to all but the code that makes masks, and notes who asks.

    So a model shows whether its logits depend on the longest sequence of a batch.
    """

    def __init__(self, layers: Iterable[object], more: int) -> None:
        super().__init__(layers)
        self.asked = False
        self._more = more

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._moved(super().get_seq_length(layer_idx))

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._moved(super().get_seq_length(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        return length, self._moved(offset)

    def _moved(self, number: int) -> int:
        if _asker() == masking_utils.__name__:
            return number
        self.asked = True
        moved = number + self._more
        return SeenTokens.of(moved, number.positions) if isinstance(number, SeenTokens) else moved


def _asker() -> str | None:
    """Returns the module whose code called the method that called the caller of this function."""
    frame = inspect.currentframe()
    for _ in range(3):
        frame = None if frame is None else frame.f_back
    return None if frame is None else frame.f_globals.get("__name__")
