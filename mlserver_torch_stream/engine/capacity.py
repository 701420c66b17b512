"""Plans a model on a device without loading weights: the model's size, how many streams fit, and how fast they are.

Sizes are read from the model's config and files. Memory sizes are what the engine allocates. Speeds are upper bounds
that no engine reaches.

The speeds of devices are without sparsity. A GB in a data sheet counts as 10^9 bytes; drivers report up to 7 % more
(85.5 GB for an H100 with 80 GB, 24.15 GB for an L4 or A10 with 24 GB).

Checked on 2026-11-22. The numbers of these devices are not from the vendor's own page, or need a remark:

- A10: 125 TFLOP/s in bf16 and 600 GB/s, in NVIDIA's a10-datasheet.pdf. The A10G that clouds offer is a different chip.
- H100 PCIe: 1,513 TFLOP/s with sparsity (half as many without), 80 GB and "greater than 2,000 GB/s", in the copy of the
  H100 data sheet at hpctech.co.jp and in the product brief PB-11133.
- RTX 4090: 165.2 TFLOP/s with sums in float32 and 1,008 GB/s, in nvidia-ada-gpu-architecture.pdf.
- B200: 2,250 TFLOP/s at 1,000 W and 8 TB/s, in table 3 of the Blackwell architecture's technical brief. Boards have 180
  GB; their driver reports a bus of 7,680 bits at 3,996 MHz (pytorch/ao, pull request 4002), which is 7.67 TB/s.

The model is created on torch's ``meta`` device, where tensors have shapes but no values, and computes three tokens
there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from mlserver_torch_stream.did_you_mean import did_you_mean_or_known
from mlserver_torch_stream.engine.attention.gathered import GatheredAttention
from mlserver_torch_stream.engine.attention.paged_attention import AttentionOptions, BatchTensors
from mlserver_torch_stream.engine.attention.registered import CannotPage
from mlserver_torch_stream.engine.cache.budget import GPU_CACHE_SHARE
from mlserver_torch_stream.engine.cache.layout import CacheLayout, UnsupportedCache
from mlserver_torch_stream.engine.cache.page_counts import largest, size_cache
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages, PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence, CacheSpec, in_all, page_size_of
from mlserver_torch_stream.engine.config_fields import layer_configs, max_model_len, read_config
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.loading.embedded import find_embedded
from mlserver_torch_stream.engine.machine import KV_SHARE
from mlserver_torch_stream.engine.tensor_parallel.validate import check_model
from mlserver_torch_stream.engine_settings import EngineSettings
from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.model_source import ModelSource


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """The memory and speeds of one device. ``source`` is the vendor's document that states them."""

    name: str
    memory: int  # bytes
    bandwidth: float  # bytes a second
    flops: float | None  # operations a second, in dense bf16 products
    source: str


def _nvidia(name: str, memory_gb: float, bandwidth_gb: float, tflops: float, sheet: str) -> DeviceSpec:
    return DeviceSpec(f"NVIDIA {name}", int(memory_gb * 1e9), bandwidth_gb * 1e9, tflops * 1e12, f"NVIDIA {sheet}")


KNOWN = {
    "l4": _nvidia("L4", 24, 300, 121, "L4 data sheet"),
    "a10": _nvidia("A10", 24, 600, 125, "A10 data sheet"),
    "l40s": _nvidia("L40S", 48, 864, 362, "L40S data sheet"),
    "rtx-4090": _nvidia("GeForce RTX 4090", 24, 1008, 165.2, "Ada GPU architecture white paper"),
    "a100-40gb": _nvidia("A100 40GB SXM", 40, 1555, 312, "A100 data sheet"),
    "a100-80gb": _nvidia("A100 80GB SXM", 80, 2039, 312, "A100 80GB data sheet"),
    "h100-pcie": _nvidia("H100 PCIe", 80, 2000, 756, "H100 data sheet"),
    "h100": _nvidia("H100 SXM", 80, 3350, 989, "H100 data sheet"),
    "h200": _nvidia("H200 SXM", 141, 4800, 989, "H200 data sheet"),
    "b200": _nvidia(
        "HGX B200", 180, 7672, 2250, "Blackwell architecture brief; memory bandwidth as the driver reports it"
    ),
}


def find_device(name: str) -> DeviceSpec:
    """Returns a device by its name. Raises SettingsError, which lists the known devices."""
    device = KNOWN.get(name.lower().replace("_", "-"))
    if device is None:
        hint = did_you_mean_or_known(name.lower(), KNOWN, str)
        advice = "for another device, give --memory and --bandwidth"
        raise SettingsError(f"--device: {name!r} is not known ({advice}){hint}")
    return device


_META = torch.device("meta")
_MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a model.

    ``experts`` is how many of the ``parameters`` belong to experts; a token uses the share ``expert_share`` of these.
    """

    kind: str
    dtype: str
    element: int  # bytes of a parameter
    parameters: int
    experts: int
    expert_share: float
    unread: int  # parameters of an embedding, of which a step reads one row per token
    spec: CacheSpec
    max_model_len: int
    ranks: tuple[int, ...]  # the numbers of ranks that can share the model

    @property
    def weight_bytes(self) -> int:
        """The size of the weights in bytes."""
        return self.parameters * self.element

    def read_per_step(self, sequences: int) -> float:
        """Returns the bytes of weights that a decode step reads.

        Each sequence is assumed to use random experts, so a step reads more experts if it has more sequences.
        """
        used = 1 - (1 - self.expert_share) ** sequences if self.experts else 0.0
        return (self.parameters - self.unread - self.experts * (1 - used)) * self.element

    @property
    def active(self) -> float:
        """The number of parameters that are used to compute one token."""
        return self.parameters - self.unread - self.experts * (1 - self.expert_share)


def read_size(
    source: ModelSource, dtype: str = "auto", revision: str | None = None, device_type: str = "cpu"
) -> ModelSize:
    """Reads a model's size from its config and files. The page size depends on ``device_type``.

    Raises LoadFailed if the config cannot be read, or if the model's code needs the values of tensors.
    """
    location, gguf_file = source.location, None
    if source.kind in ("gguf", "embedded"):
        gguf_file = find_embedded(location) if source.kind == "embedded" else Path(location)
    config = read_config(source.name, location, gguf_file, revision=revision or "main")
    if getattr(config, "quantization_config", None):
        raise LoadFailed(f"{source.name} is quantised, and its config does not say how large its weights are")
    text = layer_configs(config.get_text_config(decoder=True))[0]
    kind = getattr(torch, dtype) if dtype != "auto" else getattr(config, "dtype", None) or torch.bfloat16
    transformers_logging.disable_progress_bar()
    try:
        with _META:
            model = AutoModelForCausalLM.from_config(config, dtype=kind).eval().to(_META)
    except ValueError as error:
        what = " ".join(str(error).split())[:200]
        raise LoadFailed(f"{source.name} ({config.model_type}) is not a causal language model: {what}") from error
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    total = _first_count(text, "num_local_experts", "num_experts", "n_routed_experts")
    per_token = _first_count(text, "num_experts_per_tok", "top_k_experts")
    if experts and not (total and per_token):
        raise LoadFailed(f"the config of model type {config.model_type} does not say how many experts a token uses")
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    return ModelSize(
        kind=config.model_type,
        dtype=str(kind).removeprefix("torch."),
        element=kind.itemsize,
        parameters=sum(p.numel() for p in model.parameters()),
        experts=experts,
        expert_share=per_token / total if experts else 1.0,
        unread=0 if tied else embedding.numel(),
        spec=_spec(model, page_size_of({device_type})),
        max_model_len=max_model_len(model, None),
        ranks=_ranks(config),
    )


def _spec(model: PreTrainedModel, page_size: int) -> CacheSpec:
    """Returns the cache's spec, from a forward of three tokens on the meta device in the first form that works."""
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
                forward = ModelForward(model, way, _ShapesOnly())
                forward.device = _META
                forward(batch, cache)
            return in_all(cache.specs.values())
        except (RuntimeError, NotImplementedError, TypeError, CannotPage) as error:
            problem = error
    assert problem is not None
    raise _hidden(model, problem) from problem


class _ShapesOnly(GatheredAttention):
    def __call__(
        self, query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
    ) -> torch.Tensor:
        assert layer.values is not None
        return query.new_empty((*query.shape[:2], layer.values.shape[-1]))


def _hidden(model: PreTrainedModel, error: Exception) -> LoadFailed:
    what = " ".join(str(error).split())[:200]
    return LoadFailed(f"the cache of model type {model.config.model_type} cannot be sized without weights: {what}")


def _ranks(config: Any) -> tuple[int, ...]:
    allowed = [1]
    for size in range(2, _MAX_RANKS + 1):
        try:
            check_model(config, size)
        except LoadFailed:
            continue
        allowed.append(size)
    return tuple(allowed)


def _first_count(config: Any, *keys: str) -> int:
    """Returns the first value above 0 among these fields of the config; 0 if no field has such a value."""
    values = (getattr(config, key, 0) for key in keys)
    return next((value for value in values if isinstance(value, int) and value), 0)


_MAX_STREAMS = 4096
_CHUNK = EngineSettings.model_fields["chunked_prefill_size"].default  # new tokens of a prompt at a time


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The memory and speeds of a model on ``ranks`` devices.

    Speeds are in tokens per second; None if the device's speed is not known.
    """

    ranks: int
    weights: int  # bytes on each device
    cache: int  # bytes on each device
    streams: int
    alone: float  # one stream
    together: float  # all of them
    prompts: float | None  # prompt tokens per second

    @property
    def fits(self) -> bool:
        return self.streams > 0


def plan_model(
    size: ModelSize, device: DeviceSpec, context: int, most_devices: int, *, on_host: bool
) -> list[CapacityPlan]:
    """Returns a plan for each number of ranks up to ``most_devices`` that the model can be split over.

    ``on_host`` means that the device is this machine's CPU. Several ranks would share this memory, so only one rank is
    planned.
    """
    share = KV_SHARE if on_host else GPU_CACHE_SHARE
    counts = [ranks for ranks in size.ranks if ranks <= (1 if on_host else most_devices)]
    return [make_plan(size, device, ranks, context, share) for ranks in counts]


def make_plan(size: ModelSize, device: DeviceSpec, ranks: int, context: int, cache_share: float) -> CapacityPlan:
    """Plans a model on ``ranks`` devices.

    ``context`` is the number of tokens of each stream; ``cache_share`` is the cache's share of the memory that is left
    after the weights.
    """
    weights = size.weight_bytes // ranks
    cache = max(0, int((device.memory - weights) * cache_share))
    streams = _streams(size, ranks, cache, context)
    return CapacityPlan(
        ranks=ranks,
        weights=weights,
        cache=cache,
        streams=streams,
        alone=_decode(size, device, ranks, context, 1),
        together=_decode(size, device, ranks, context, max(1, streams)),
        prompts=None if device.flops is None else ranks * device.flops / (2 * size.active),
    )


def _streams(size: ModelSize, ranks: int, cache: int, context: int) -> int:
    """Returns how many sequences of ``context`` tokens fit into the cache at the same time."""

    def holds(count: int) -> bool:
        rooms = [(size.spec, cache * ranks)]
        pages = size_cache(rooms, sequences=count, tokens=context, step=min(_CHUNK, context))
        return pages.holds(size.spec, count, context)

    return largest(_MAX_STREAMS, holds)


def _decode(size: ModelSize, device: DeviceSpec, ranks: int, context: int, sequences: int) -> float:
    """Returns tokens per second: the lower of the limits from memory reads (weights and caches) and multiplications."""
    seconds = (size.read_per_step(sequences) + sequences * size.spec.live_bytes(context)) / (ranks * device.bandwidth)
    if device.flops is not None:
        seconds = max(seconds, sequences * 2 * size.active / (ranks * device.flops))
    return sequences / seconds
