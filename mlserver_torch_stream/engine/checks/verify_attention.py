"""Decides at load whether a model's attention runs on our own kernels: they must give the reference's results.

If anything fails here, the plain attention is taken, and its reason is logged.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from mlserver_torch_stream.engine.attention.native_attention import NativeAttention
from mlserver_torch_stream.engine.attention.paged_attention import (
    AttentionOptions,
    BatchTensors,
    PagedAttention,
    PageWriter,
)
from mlserver_torch_stream.engine.attention.reference import AttentionShape, farthest, reference_attention
from mlserver_torch_stream.engine.attention.registered import CannotPage
from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages, PagedCache
from mlserver_torch_stream.engine.failures import in_a_line
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.native.compile_kernels import NoKernels
from mlserver_torch_stream.engine.stage_log import stage
from mlserver_torch_stream.errors import LoadFailed

logger = logging.getLogger(__name__)

_PAGE_SIZE = 16
# Of a query's and a head's output, against its size: two to four times the error that rounding makes of random values.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """``name`` names the attention in the load summary, with its threads or the reason for it."""

    attention: PagedAttention
    write: PageWriter
    name: str


def take_attention_kernels(
    model: transformers.PreTrainedModel,
    plain: PagedAttention,
    cache_dir: Path,
    way: Way = Way.PACKED,
    page_size: int = _PAGE_SIZE,
) -> AttentionChoice:
    """Returns our kernels if they are right on the shapes of the model's own attentions, else ``plain``.

    ``way`` is that in which the model takes batches. Raises LoadFailed if the environment names kernels that this CPU
    does not run.
    """
    try:
        kernels = NativeAttention(cache_dir, plain)
        with stage(logger, "Comparing the attention of the kernels with torch's"):
            problem = _problem(model, kernels, way, page_size)
    except LoadFailed:
        raise
    except (NoKernels, CannotPage) as error:
        problem = str(error)
    except Exception as error:  # a model's code can raise any error
        problem = in_a_line(error)
    if problem is not None:
        logger.warning("the attention kernels are not used, torch computes attention: %s", problem)
        return AttentionChoice(plain, LayerPages.write, f"torch's attention ({problem})")
    return AttentionChoice(kernels, kernels.write, f"attention kernels ({kernels.variant}, {kernels.threads})")


def _problem(model: transformers.PreTrainedModel, attention: NativeAttention, way: Way, page_size: int) -> str | None:
    """Returns why the kernels must not attend in this model; None if they give the reference's results."""
    if way is Way.MASKED_ROWS:
        return "its attention cannot be replaced"
    shapes = attention_shapes(model, way)
    if not shapes:
        return "the model has no attention on a CPU"
    if not _writes_alike(attention, shapes[0], page_size):
        return "the kernels write keys and values elsewhere than torch"
    for shape in shapes:
        difference = farthest(attention, shape.narrowed, page_size)
        if not difference <= TOLERANCE.get(shape.dtype, 0.0):
            return f"the kernels' results differ from torch's by {difference:.1g} for {shape}"
    return None


def attention_shapes(model: transformers.PreTrainedModel, way: Way = Way.PACKED) -> list[AttentionShape]:
    """Runs two tokens through the model and returns the unlike shapes of its attentions on CPUs. Raises CannotPage."""
    seen: dict[AttentionShape, None] = {}

    def record(query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions) -> torch.Tensor:
        if query.device.type == "cpu":
            seen[AttentionShape.of(query, layer, options)] = None
        return reference_attention(query, layer, batch, options)

    layout = CacheLayout(model.config)
    groups = len(layout.spec(_PAGE_SIZE).groups)
    cache = PagedCache(layout, _PAGE_SIZE, [1] * groups, state_slots=1)
    tokens = BatchSequence((0, 1), 0, ((0,),) * groups, state_slot=0)
    with torch.inference_mode():
        ModelForward(model, way, record)(Batch((tokens,)), cache)
    return list(seen)


def _writes_alike(attention: NativeAttention, shape: AttentionShape, page_size: int) -> bool:
    """Returns whether the kernels write keys and values, which lie by heads in a model, to the right slots of pages."""
    tokens, pages = 3 * page_size, 4
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(2))[:tokens]
    layers = [LayerPages(0, pages, page_size) for _ in range(2)]
    heads = shape.kv_heads
    key, value = (
        (torch.arange(heads * tokens * dim) % 251).reshape(heads, tokens, dim).to(shape.dtype).transpose(0, 1)
        for dim in (shape.key_dim, shape.value_dim)
    )
    for layer, write in zip(layers, (LayerPages.write, attention.write), strict=True):
        layer.reserve(key.transpose(0, 1), value.transpose(0, 1))
        assert layer.keys is not None and layer.values is not None
        layer.keys.zero_()
        layer.values.zero_()
        write(layer, key, value, slots)
    return all(torch.equal(getattr(layers[0], pool), getattr(layers[1], pool)) for pool in ("keys", "values"))
