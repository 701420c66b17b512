"""Where a model's forward is cut: each of its attentions, whose keys and values grow with every token.

Knows nothing of graphs. A model asks transformers for its attention function by a name in its config, and under ours
gets one that hands the call to whoever follows the forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

_NAME = "mlserver_torch_stream_cut"
SDPA, EAGER = "sdpa", "eager"  # whose masks we know how to make

Attend = Callable[..., tuple[torch.Tensor, Any]]
"""As transformers calls it: module, query, key, value, mask, and more by name."""


class CannotCut(Exception):
    """The model's code does not go through the attentions that it can be cut at."""


_follower: ContextVar[Attend] = ContextVar("follower")


def _hand_over(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    return _follower.get()(*args, **kwargs)


AttentionInterface.register(_NAME, _hand_over)


@contextmanager
def cut_at_attention(model: PreTrainedModel, follower: Attend) -> Iterator[None]:
    """Calls of ``model`` meanwhile have ``follower`` for attention, and no masks. Raises CannotCut."""
    before = model.config._attn_implementation
    if before not in (SDPA, EAGER):
        raise CannotCut(f"its attention is {before!r}, not {SDPA!r} or {EAGER!r}")
    token = _follower.set(follower)
    try:
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        _follower.reset(token)


def attention_of(implementation: str, module: nn.Module) -> Attend:
    """What a model calls for this module; an eager one stands in the model's own file. Raises CannotCut."""
    if implementation == SDPA:
        attend: Attend = AttentionInterface()[SDPA]
        return attend
    own: Attend | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise CannotCut(f"the attention of {type(module).__name__} is not to be found")
    return own


class PassingLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keeps nothing: keys and values of the new tokens come back as they are."""

    is_compileable = False

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self.given: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.given = (key_states, value_states)
        return self.given

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of ``get_max_length`` before transformers 5.20."""
        return -1


class PassingCache(Cache):  # type: ignore[misc]
    """A cache of such layers, which knows whose keys and values it has seen last."""

    def __init__(self, windows: list[int | None]) -> None:
        super().__init__(layers=[PassingLayer(window) for window in windows])

    def layer_of(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """The layer that these very tensors were given to. Raises CannotCut."""
        for index, layer in enumerate(self.layers):
            if layer.given is not None and layer.given[0] is keys and layer.given[1] is values:
                return index
        raise CannotCut("an attention's keys and values are not those of a cache layer")
