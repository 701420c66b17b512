"""Decides at load which attention transformers' forward uses: kernels that match torch's operators, or the operators.

The kernels are our own on CPUs and varlen attention on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
import transformers

from mlserver_torch_stream.engine.attention.gathered import GatheredAttention
from mlserver_torch_stream.engine.attention.paged_attention import (
    AttentionOptions,
    AttentionShape,
    BatchTensors,
    PagedAttention,
)
from mlserver_torch_stream.engine.attention.varlen import VarlenAttention, find_varlen
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages, PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.checks.attention_error import farthest, narrowed
from mlserver_torch_stream.engine.checks.harness import Check, Verdict, accepted
from mlserver_torch_stream.engine.checks.selfcheck import SelfCheckResult
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.native.native_attention import NativeAttention

# The largest error of one query's and head's output, relative to its size: two to four times the rounding error on
# random values.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@dataclass(frozen=True)
class SameAttention(Check[PagedAttention]):
    """Checks that an attention has the results of torch's operators on the shapes of the model's own attentions.

    ``way`` is how the model takes batches.
    """

    name: ClassVar[str] = "same attention"
    model: transformers.PreTrainedModel
    way: Way
    page_size: int

    def problem(self, candidate: PagedAttention) -> str | None:
        if self.way is Way.MASKED_ROWS:
            return "its attention cannot be replaced"
        kinds = attention_kinds(self.model, candidate, self.way, self.page_size)
        if all(kinds.values()):
            return "; ".join(dict.fromkeys(filter(None, kinds.values()))) or "the model has no attention"
        for (shape, device), refusal in kinds.items():
            if refusal is not None:
                continue
            if not _writes_alike(candidate, shape, self.page_size, device):
                return "the kernels write keys and values elsewhere than torch"
            difference = farthest(candidate, narrowed(shape), self.page_size, device)
            if not difference <= TOLERANCE.get(shape.dtype, 0.0):
                return f"the kernels' results differ from torch's by {difference:.1g} for {shape}"
        return None


def choose_attention(
    model: transformers.PreTrainedModel, findings: SelfCheckResult, cache_dir: Path
) -> Verdict[PagedAttention]:
    """Returns the kernels for the devices that hold the pages; offloaded weights compute there, too.

    Raises LoadFailed if the environment names kernels that this CPU does not run.
    """
    types = {device.type for device in findings.specs}
    if types not in ({"cpu"}, {"cuda"}):
        return Verdict(None, f"pages are on {' and '.join(sorted(types)) or 'no device'}")
    kernels: Callable[[], PagedAttention] = (
        partial(NativeAttention, cache_dir) if types == {"cpu"} else lambda: VarlenAttention(find_varlen())
    )
    check = SameAttention(model, findings.way, findings.page_size)
    otherwise = "the attention kernels are not used, torch computes attention"
    return accepted("the attention kernels", kernels, check, otherwise)


def attention_kinds(
    model: transformers.PreTrainedModel, attention: PagedAttention, way: Way = Way.PACKED, page_size: int = 16
) -> dict[tuple[AttentionShape, torch.device], str | None]:
    """Runs two tokens through the model. Returns the distinct shapes and devices of its attention calls.

    Each value says why ``attention`` refuses the call, or is None. Raises CannotPage.
    """
    kinds: dict[tuple[AttentionShape, torch.device], str | None] = {}

    class Recorder(GatheredAttention):
        def __call__(
            self, query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions
        ) -> torch.Tensor:
            kind = AttentionShape.of(query, layer, options), query.device
            kinds[kind] = attention.refusal(query, layer, options)
            return super().__call__(query, layer, batch, options)

    layout = CacheLayout(model.config)
    groups = len(layout.spec(page_size).groups)
    cache = PagedCache(layout, page_size, [1] * groups, state_slots=1)
    tokens = BatchSequence((0, 1), 0, ((0,),) * groups, state_slot=0)
    with torch.inference_mode():
        ModelForward(model, way, Recorder())(Batch((tokens,)), cache)
    return kinds


def _writes_alike(attention: PagedAttention, shape: AttentionShape, page_size: int, device: torch.device) -> bool:
    """Returns whether an attention writes keys and values to the right slots. In a model they are ordered by head."""
    tokens, pages, heads = 3 * page_size, 4, shape.kv_heads
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(2))[:tokens].to(device)
    layers = [LayerPages(0, pages, page_size) for _ in range(2)]
    key, value = (
        (torch.arange(heads * tokens * dim, device=device) % 251).reshape(heads, tokens, dim).to(shape.dtype)
        for dim in (shape.key_dim, shape.value_dim)
    )
    for layer, write in zip(layers, (LayerPages.write, attention.write), strict=True):
        layer.reserve(key, value)
        assert layer.keys is not None and layer.values is not None
        layer.keys.zero_()
        layer.values.zero_()
        write(layer, key.transpose(0, 1), value.transpose(0, 1), slots)
    return all(torch.equal(getattr(layers[0], pool), getattr(layers[1], pool)) for pool in ("keys", "values"))
