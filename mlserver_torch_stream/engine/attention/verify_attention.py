"""Decides at load whether a model's attention runs on our own kernels: they must give the reference's results.

Knows nothing of engines. If anything fails here, the plain attention is taken, and its reason is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.attention.native_attention import NativeAttention
from mlserver_torch_stream.engine.attention.paged_attention import (
    AttentionOptions,
    BatchTensors,
    PagedAttention,
    PageWriter,
    batch_tensors,
)
from mlserver_torch_stream.engine.attention.reference import reference_attention
from mlserver_torch_stream.engine.attention.registered import CannotPage
from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.forward.model_forward import ModelForward, Way
from mlserver_torch_stream.engine.kv_cache.layout import CacheLayout
from mlserver_torch_stream.engine.kv_cache.paged_cache import LayerPages, PagedCache
from mlserver_torch_stream.engine.loading.stage_log import stage
from mlserver_torch_stream.engine.native.compile_kernels import NoKernels
from mlserver_torch_stream.errors import LoadFailed

logger = logging.getLogger(__name__)

# Tokens in the cache and new ones of the sequences that are compared: short and long, one new token, some, a chunk.
_SEQUENCES = ((0, 1), (15, 1), (16, 2), (612, 1), (299, 7), (550, 70))
_FAR = 300  # a wider window or chunk is compared as one of this width, which those sequences reach beyond
_CAP = 3.0  # a higher softcap is compared as this one, near which the random scores are
_PAGE_SIZE = 16
# Of a query's and a head's output, against its size: twice to four times what rounding makes of random values.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """``name`` is for the summary of a load: what attends, and on which threads or for which reason."""

    attention: PagedAttention
    write: PageWriter
    name: str


def take_attention_kernels(
    model: PreTrainedModel, plain: PagedAttention, cache_dir: Path, way: Way = Way.PACKED, page_size: int = _PAGE_SIZE
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
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    if problem is not None:
        logger.warning("no attention kernels, torch attends: %s", problem)
        return AttentionChoice(plain, LayerPages.write, f"torch's attention ({problem})")
    return AttentionChoice(kernels, kernels.write, f"attention kernels ({kernels.variant}, {kernels.threads})")


def _problem(model: PreTrainedModel, attention: NativeAttention, way: Way, page_size: int) -> str | None:
    """Returns why the kernels must not attend in this model; None if they give the reference's results."""
    if way is Way.MASKED_ROWS:
        return "its attention cannot be replaced"
    shapes = attention_shapes(model, way)
    if not shapes:
        return "the model has no attention on a CPU"
    if not _writes_alike(attention, shapes[0], page_size):
        return "the kernels write keys and values elsewhere than torch"
    for shape in shapes:
        difference = farthest(attention, shape, page_size)
        if not difference <= TOLERANCE.get(shape.dtype, 0.0):
            return f"the kernels' results differ from torch's by {difference:.1g} for {shape}"
    return None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What an attention of a model is called with."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


def attention_shapes(model: PreTrainedModel, way: Way = Way.PACKED) -> list[AttentionShape]:
    """Runs two tokens through the model and returns the unlike shapes of its attentions on CPUs. Raises CannotPage."""
    seen: dict[AttentionShape, None] = {}

    def record(query: torch.Tensor, layer: LayerPages, batch: BatchTensors, options: AttentionOptions) -> torch.Tensor:
        assert layer.keys is not None and layer.values is not None
        if query.device.type == "cpu":
            dims = (query.shape[1], layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
            sight = (options.window, options.chunk, options.softcap)
            seen[AttentionShape(*dims, query.dtype, options.scale, *sight, options.sinks is not None)] = None
        return reference_attention(query, layer, batch, options)

    layout = CacheLayout(model.config)
    groups = len(layout.spec(_PAGE_SIZE).groups)
    cache = PagedCache(layout, _PAGE_SIZE, [1] * groups, state_slots=1)
    tokens = BatchSequence((0, 1), 0, ((0,),) * groups, state_slot=0)
    with torch.inference_mode():
        ModelForward(model, way, record)(Batch((tokens,)), cache)
    return list(seen)


def farthest(attention: PagedAttention, shape: AttentionShape, page_size: int = _PAGE_SIZE) -> float:
    """Returns how far an attention is from the exact results on random values, of a query's and head's output at most.

    What no query sees is NaN, so that a read of it shows.
    """
    random = torch.Generator().manual_seed(0)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random).to(shape.dtype)

    batch, pages = _batch(page_size)
    layer = LayerPages(0, pages, page_size)
    tensors = batch_tensors(batch, page_size, 1, torch.device("cpu"))
    _fill(layer, batch, shape, numbers)
    options = AttentionOptions(
        shape.scale,
        window=None if shape.window is None else min(shape.window, _FAR),
        chunk=None if shape.chunk is None else min(shape.chunk, _FAR),
        softcap=None if shape.softcap is None else min(shape.softcap, _CAP),
        sinks=numbers(shape.heads) if shape.has_sinks else None,
    )
    query = numbers(batch.tokens, shape.heads, shape.key_dim) / (shape.scale * shape.key_dim**0.5)
    ours = attention(query, layer, tensors, options).float()
    assert layer.keys is not None and layer.values is not None
    wide = replace(layer, keys=layer.keys.float(), values=layer.values.float())
    exact = reference_attention(query.float(), wide, tensors, options)
    error = (ours - exact).norm(dim=-1) / exact.norm(dim=-1)
    return float(error.max())


def _writes_alike(attention: NativeAttention, shape: AttentionShape, page_size: int) -> bool:
    """Returns whether keys and values that lie by heads, as a model's do, come to the same places of pages."""
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


def _batch(page_size: int) -> tuple[Batch, int]:
    """Returns the sequences that are compared, on pages in no order, and the number of the pages."""
    counts = [-(-(start + count) // page_size) for start, count in _SEQUENCES]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    sequences = []
    for (start, count), pages in zip(_SEQUENCES, counts, strict=True):
        sequences.append(BatchSequence((0,) * count, start, (tuple(order[:pages]),)))
        order = order[pages:]
    return Batch(tuple(sequences)), sum(counts)


def _fill(layer: LayerPages, batch: Batch, shape: AttentionShape, numbers: Callable[..., torch.Tensor]) -> None:
    """Writes random keys and values of all tokens of the sequences, and NaN behind them."""
    layer.keys = torch.full((layer.pages, shape.kv_heads, layer.page_size, shape.key_dim), torch.nan, dtype=shape.dtype)
    layer.values = layer.keys.new_full((*layer.keys.shape[:3], shape.value_dim), torch.nan)
    size = layer.page_size
    for each in batch.sequences:
        slots = [each.tables[0][position // size] * size + position % size for position in range(each.length)]
        keys, values = (numbers(each.length, shape.kv_heads, dim) for dim in (shape.key_dim, shape.value_dim))
        layer.write(keys, values, torch.tensor(slots))
