"""Cuts a model's forward at each of its attentions, whose keys and values grow with every token.

Knows nothing of graphs. transformers looks an attention function up by the name in the model's config. During a cut
this name is ours, and our function passes each call to the one that the caller of ``cut_at_attention`` gives.
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
SDPA, EAGER = "sdpa", "eager"  # the implementations whose masks ``decode_masks`` makes

Attend = Callable[..., tuple[torch.Tensor, Any]]
"""An attention function of transformers: module, query, key, value, mask, and options by name."""


class CannotCut(Exception):
    """The model's code does not call the attention functions at which a forward can be cut."""


_replacement: ContextVar[Attend] = ContextVar("replacement")


def _call_replacement(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    return _replacement.get()(*args, **kwargs)


AttentionInterface.register(_NAME, _call_replacement)


@contextmanager
def cut_at_attention(model: PreTrainedModel, replacement: Attend) -> Iterator[None]:
    """Inside it, ``model`` calls ``replacement`` for each attention, and makes no masks. Raises CannotCut."""
    before = model.config._attn_implementation
    if before not in (SDPA, EAGER):
        raise CannotCut(f"its attention is {before!r}, not {SDPA!r} or {EAGER!r}")
    token = _replacement.set(replacement)
    try:
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        _replacement.reset(token)


def attention_of(implementation: str, module: nn.Module) -> Attend:
    """Returns the function that a model calls for this module. The eager one is in the model's own file.

    Raises CannotCut.
    """
    if implementation == SDPA:
        attend: Attend = AttentionInterface()[SDPA]
        return attend
    own: Attend | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise CannotCut(f"the attention of {type(module).__name__} is not to be found")
    return own


class PassingLayer(CacheLayerMixin):  # type: ignore[misc]
    """A cache layer that stores nothing: it returns the keys and values of the new tokens."""

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

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class PassingCache(Cache):  # type: ignore[misc]
    """A cache of ``PassingLayer``, which finds the layer of an attention by the tensors that it returned."""

    def __init__(self, windows: list[int | None]) -> None:
        super().__init__(layers=[PassingLayer(window) for window in windows])

    def layer_of(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Returns the layer that has got these very tensors. Raises CannotCut."""
        for index, layer in enumerate(self.layers):
            if layer.given is not None and layer.given[0] is keys and layer.given[1] is values:
                return index
        raise CannotCut("an attention's keys and values are not those of a cache layer")
