"""Makes a model's attention run over pages, with functions that are registered with transformers' interfaces.

Outside a paged forward, these functions call transformers' own functions, so the model can be called as before.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
import transformers
from torch import nn

from mlserver_torch_stream.engine.failures import Unsuitable

SDPA, EAGER = "sdpa", "eager"
_NAMES = {SDPA: "mlserver_torch_stream_sdpa", EAGER: "mlserver_torch_stream_eager"}
_OWN = {ours: own for own, ours in _NAMES.items()}


class CannotPage(Unsuitable):
    """Raised if the model's code does not call the attention functions that can be replaced."""


class AttentionCall(Protocol):
    """Computes one attention call of a forward. ``query`` is ``[rows, heads, tokens, head_dim]``."""

    def __call__(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor: ...


# Each thread has its own value: forwards of one model run in several threads at once, each with its own batch.
_call: ContextVar[AttentionCall | None] = ContextVar("paged_attention", default=None)


def take_attention(model: transformers.PreTrainedModel) -> None:
    """Registers our functions as the model's attention. Raises CannotPage if the attention is of another kind."""
    before = _text_config(model)._attn_implementation
    if before in _OWN:
        return
    if before not in _NAMES:
        raise CannotPage(f"the model's attention is {before!r}, not {SDPA!r} or {EAGER!r}")
    ours = _NAMES[before]
    transformers.AttentionInterface.register(ours, partial(_attend, before))
    transformers.AttentionMaskInterface.register(ours, partial(_mask, before))
    _set_attention(model, ours)


def give_attention_back(model: transformers.PreTrainedModel) -> None:
    """Undoes ``take_attention``."""
    before = _text_config(model)._attn_implementation
    if before in _OWN:
        _set_attention(model, _OWN[before])


def _text_config(model: transformers.PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _set_attention(model: transformers.PreTrainedModel, name: str) -> None:
    """Sets the attention of the text model only.

    Encoders of images or audio, such as Gemma 4's audio encoder, may not support our attention.
    """
    text = _text_config(model)
    parts = [key for key in model.config.sub_configs if getattr(model.config, key, None) is text]
    model.set_attn_implementation(dict.fromkeys(["", *parts], name))


@contextmanager
def paged(call: AttentionCall) -> Iterator[None]:
    """While the context is open, models on this thread compute attention with ``call`` and do not make masks."""
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)


def _attend(
    implementation: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    call = _call.get()
    if call is None:
        result: tuple[torch.Tensor, Any] = _own(implementation, module)(
            module, query, key, value, attention_mask, **options
        )
        return result
    if attention_mask is not None or options.get("position_bias") is not None:
        raise CannotPage("the model's code makes its own masks")
    return call(module, query, key, value, **options), None


def _own(implementation: str, module: nn.Module) -> Callable[..., Any]:
    """Returns transformers' own attention function. The eager function is in the same file as the class of the module.

    Raises CannotPage if that file has no such function.
    """
    if implementation == SDPA:
        attend: Callable[..., Any] = transformers.AttentionInterface()[SDPA]
        return attend
    for known in (inspect.unwrap(type(module).forward).__globals__, vars(sys.modules[type(module).__module__])):
        own: Callable[..., Any] | None = known.get("eager_attention_forward")
        if own is not None:
            return own
    raise CannotPage(f"the attention function of {type(module).__name__} is not found")


def _mask(implementation: str, *args: Any, **options: Any) -> Any:
    if _call.get() is not None:
        return None
    return transformers.AttentionMaskInterface()[implementation](*args, **options)
