"""Computes a model's weights and the cost of a token in its cache from its config. Loads no weights.

Knows nothing of devices. The model is made on torch's ``meta`` device, where tensors have shapes only, and takes three
tokens there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from mlserver_torch_stream.engine.attention.paged_attention import AttentionOptions, BatchTensors
from mlserver_torch_stream.engine.attention.registered import CannotPage
from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.kv_cache.cache_spec import CacheSpec, in_all, page_size_of
from mlserver_torch_stream.engine.kv_cache.layout import CacheLayout, UnsupportedCache
from mlserver_torch_stream.engine.kv_cache.paged_cache import LayerPages, PagedCache
from mlserver_torch_stream.engine.loading.config_fields import layer_configs, read_config
from mlserver_torch_stream.engine.loading.context_length import max_model_len
from mlserver_torch_stream.engine.loading.embedded import find_embedded
from mlserver_torch_stream.engine.tensor_parallel.validate import check_model
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.model_source import ModelSource

_META = torch.device("meta")
_MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class ModelSize:
    """``experts`` of the ``parameters`` are in mixtures, of which each token uses the part ``expert_share``."""

    kind: str
    dtype: str
    element: int  # bytes of a parameter
    parameters: int
    experts: int
    expert_share: float
    unread: int  # an embedding of which a step reads one row per token
    spec: CacheSpec
    max_model_len: int
    ranks: tuple[int, ...]  # the numbers of ranks that can share the model

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.element

    def read_per_step(self, sequences: int) -> float:
        """Returns the bytes of weights that a decode step reads.

        Sequences use experts as if at random: a step of more sequences reads more of them.
        """
        used = 1 - (1 - self.expert_share) ** sequences if self.experts else 0.0
        return (self.parameters - self.unread - self.experts * (1 - used)) * self.element

    @property
    def active(self) -> float:
        """The parameters that one token is multiplied with."""
        return self.parameters - self.unread - self.experts * (1 - self.expert_share)


def read_size(
    source: ModelSource, dtype: str = "auto", revision: str | None = None, device_type: str = "cpu"
) -> ModelSize:
    """``device_type`` decides how many tokens a page of the cache holds.

    Raises LoadFailed if the config cannot be read, or if the model's code needs more than shapes.
    """
    location, gguf_file = source.location, None
    if source.kind in ("gguf", "embedded"):
        gguf_file = find_embedded(location) if source.kind == "embedded" else Path(location)
    config = read_config(source.name, location, gguf_file, revision=revision or "main")
    if getattr(config, "quantization_config", None):
        raise LoadFailed(f"{source.name} is quantised, and a config does not say how large that makes it")
    text = layer_configs(config.get_text_config(decoder=True))[0]
    kind = getattr(torch, dtype) if dtype != "auto" else getattr(config, "dtype", None) or torch.bfloat16
    transformers_logging.disable_progress_bar()
    try:
        with _META:
            model = AutoModelForCausalLM.from_config(config, dtype=kind).eval().to(_META)
    except ValueError as error:
        what = " ".join(str(error).split())[:200]
        raise LoadFailed(f"{source.name} ({config.model_type}) makes no causal language model: {what}") from error
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    total = _first_count(text, "num_local_experts", "num_experts", "n_routed_experts")
    taken = _first_count(text, "num_experts_per_tok", "top_k_experts")
    if experts and not (total and taken):
        raise LoadFailed(f"models of type {config.model_type} do not say how many experts a token takes")
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    return ModelSize(
        kind=config.model_type,
        dtype=str(kind).removeprefix("torch."),
        element=kind.itemsize,
        parameters=sum(p.numel() for p in model.parameters()),
        experts=experts,
        expert_share=taken / total if experts else 1.0,
        unread=0 if tied else embedding.numel(),
        spec=_spec(model, page_size_of({device_type})),
        max_model_len=max_model_len(model, None),
        ranks=_ranks(config),
    )


def _spec(model: PreTrainedModel, page_size: int) -> CacheSpec:
    """Runs three tokens that have shapes only, in the first way in which the model takes them."""
    problem: Exception | None = None
    try:
        layout = CacheLayout(model.config)
    except UnsupportedCache as error:
        raise _hidden(model, error) from error
    groups = len(layout.spec(page_size).groups)
    batch = Batch((BatchSequence((1, 2, 3), 0, ((0,),) * groups, state_slot=0 if layout.has_states else -1),))
    for way in Way:
        cache = PagedCache(layout, page_size, [1] * groups, state_slots=1)
        try:
            with torch.inference_mode(), _META:
                forward = ModelForward(model, way, _shapes_only)
                forward.device = _META
                forward(batch, cache)
            return in_all(cache.specs.values())
        except (RuntimeError, NotImplementedError, TypeError, CannotPage) as error:
            problem = error
    assert problem is not None
    raise _hidden(model, problem) from problem


def _shapes_only(
    query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
) -> torch.Tensor:
    assert layer.values is not None
    return query.new_empty((*query.shape[:2], layer.values.shape[-1]))


def _hidden(model: PreTrainedModel, error: Exception) -> LoadFailed:
    what = " ".join(str(error).split())[:200]
    return LoadFailed(f"the cache of models of type {model.config.model_type} shows with weights only: {what}")


def _ranks(config: Any) -> tuple[int, ...]:
    allowed = [1]
    for size in range(2, _MOST_RANKS + 1):
        try:
            check_model(config, size)
        except LoadFailed:
            continue
        allowed.append(size)
    return tuple(allowed)


def _first_count(config: Any, *keys: str) -> int:
    """Returns the first of these fields that is a number above 0; 0 if none is."""
    values = (getattr(config, key, 0) for key in keys)
    return next((value for value in values if isinstance(value, int) and value), 0)
