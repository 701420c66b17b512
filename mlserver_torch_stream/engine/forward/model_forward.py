"""One call of a model on new tokens over a row cache, whatever names and masks the model's forward takes.

Knows nothing of requests or of sampling.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.kv_cache.row_cache import RowCache


class Forward(Protocol):
    """One call of a model: tokens ``[rows][queries]`` and their cache in, logits ``[rows, vocabulary]`` out.

    The logits are those of each row's last token. Counts the tokens in the cache; if it raises, none are.
    """

    def __call__(self, tokens: Sequence[Sequence[int]], cache: RowCache) -> torch.Tensor: ...


@runtime_checkable
class JointForward(Forward, Protocol):
    """One that can also take the rows of several caches in one call, so that the weights are read once for all."""

    def together(self, parts: Sequence[tuple[Sequence[Sequence[int]], RowCache]]) -> list[torch.Tensor]:
        """The same for each part, with as many tokens for every row of every part. All or, if it raises, none."""


class ModelForward:
    """``forward(tokens, cache)``: tokens ``[rows][queries]`` in, the logits of each row's last token out.

    Accelerate's hooks move the inputs to each layer's device; the cache allocates where a layer's keys are. The logits
    are where the model's last module is.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._forward = plain_forward(model)
        names = inspect.signature(model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in names else "cache_params"
        self._takes_positions = "position_ids" in names
        self._takes_mask = "attention_mask" in names
        self._takes_keep = "logits_to_keep" in names
        self.device = input_device(model)

    def __call__(self, tokens: Sequence[Sequence[int]], cache: RowCache) -> torch.Tensor:
        """Returns logits ``[rows, vocabulary]`` of the model's own dtype and counts the tokens in ``cache``."""
        return self.logits(tokens, cache, 1)[:, -1]

    def logits(self, tokens: Sequence[Sequence[int]], cache: RowCache, count: int) -> torch.Tensor:
        """The same of the last ``count`` tokens of each row and perhaps of more, ``[rows, tokens, vocabulary]``."""
        queries = len(tokens[0])
        inputs: dict[str, Any] = {self._cache_name: cache.cache, "use_cache": True, "return_dict": True}
        if self._takes_keep:
            inputs["logits_to_keep"] = count
        if self._takes_mask:
            inputs["attention_mask"] = cache.mask(queries, self.device)
        if self._takes_positions:
            inputs["position_ids"] = cache.positions(queries, self.device)
        try:
            output = self._forward(torch.tensor(tokens, device=self.device), **inputs)
        except BaseException:
            cache.rollback()
            raise
        cache.commit(queries)
        logits: torch.Tensor = output.logits
        return logits


def plain_forward(model: PreTrainedModel) -> Callable[..., Any]:
    """The model, without accelerate's hook around the whole of it, which brings the output to where the input was.

    Between GPUs that copy waits for all that is queued on either, which may be other rows.
    """
    hook = getattr(model, "_hf_hook", None)
    fetches = any(getattr(part, "offload", False) for part in getattr(hook, "hooks", (hook,)))
    forward: Callable[..., Any] = model if hook is None or fetches else model._old_forward
    return forward


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model wants its token ids; an offloaded embedding is on ``meta`` and its hook knows."""
    embedding = model.get_input_embeddings()
    device: torch.device = embedding.weight.device
    if device.type != "meta":
        return device
    return torch.device(getattr(getattr(embedding, "_hf_hook", None), "execution_device", None) or "cpu")
