"""Decides at load how transformers' forward computes attention: with torch's operators, or with equivalent kernels.

The kernels are our own on CPUs, and torch's varlen attention on CUDA GPUs. The error of the kernels is measured against
torch's own attention in float32, on random sequences and layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    batch_tensors,
)
from mlserver_torch_stream.engine.attention.varlen import VarlenAttention, find_varlen
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages, PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.checks.harness import Check, Verdict, accepted
from mlserver_torch_stream.engine.checks.selfcheck import SelfCheckResult
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.native.native_attention import NativeAttention

# The largest error of one query's and head's output, relative to its size: two to four times the rounding error on
# random values.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
_CPU = torch.device("cpu")
_FAR = 300  # a window or chunk that is shorter than some of the sequences that are compared
_CAP = 3.0  # a softcap that the random scores are near


@dataclass(frozen=True)
class SameAttention(Check[PagedAttention]):
    """Checks that an attention gets the same results as torch's operators, for the shapes of a model's attention calls.

    ``way`` is the form of batches that the model gets.
    """

    name: ClassVar[str] = "same attention"
    model: transformers.PreTrainedModel
    way: Way
    page_size: int

    def problem(self, candidate: PagedAttention) -> str | None:
        if self.way is Way.MASKED_ROWS:
            return "the model's attention cannot be replaced"
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
    """Returns the kernels for the devices with the pages: attention runs there, even if weights are offloaded.

    Raises LoadFailed if the environment names kernels that this CPU does not run.
    """
    types = {device.type for device in findings.specs}
    if types not in ({"cpu"}, {"cuda"}):
        return Verdict(None, f"pages are on {' and '.join(sorted(types)) or 'no device'}")
    kernels: Callable[[], PagedAttention] = (
        partial(NativeAttention, cache_dir) if types == {"cpu"} else lambda: VarlenAttention(find_varlen())
    )
    check = SameAttention(model, findings.way, findings.page_size)
    otherwise = "torch computes attention, because the attention kernels are not used"
    return accepted("the attention kernels", kernels, check, otherwise)


def attention_kinds(
    model: transformers.PreTrainedModel, attention: PagedAttention, way: Way = Way.PACKED, page_size: int = 16
) -> dict[tuple[AttentionShape, torch.device], str | None]:
    """Runs two tokens through the model and returns the distinct shapes and devices of its attention calls.

    Each value in the result says why ``attention`` refuses such a call; None means that it accepts the call. Raises
    CannotPage.
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
    """Returns whether an attention writes keys and values to the right slots if their memory is ordered by head."""
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


def narrowed(shape: AttentionShape) -> AttentionShape:
    """Returns the shape with a window, chunk and softcap that affect even short sequences with random scores."""
    return replace(
        shape,
        window=None if shape.window is None else min(shape.window, _FAR),
        chunk=None if shape.chunk is None else min(shape.chunk, _FAR),
        softcap=None if shape.softcap is None else min(shape.softcap, _CAP),
    )


def farthest(
    attention: PagedAttention, shape: AttentionShape, page_size: int = 16, device: torch.device = _CPU
) -> float:
    """Returns the largest relative error of any head's output for any query.

    Some sequences are short and some long; they have one new token, a few new tokens, or a chunk. First all sequences
    run together, then only the sequences with one new token, then a single sequence. Values that no query sees are NaN,
    so that an attention that reads them returns NaN.
    """
    single = [(0, 1), (page_size - 1, 1), (612, 1)]
    batches = ([*single, (page_size, 2), (299, 7), (550, 70)], single, single[-1:])
    return max(_error(attention, shape, page_size, sequences, device) for sequences in batches)


def _error(
    attention: PagedAttention,
    shape: AttentionShape,
    page_size: int,
    sequences: Sequence[tuple[int, int]],
    device: torch.device,
) -> float:
    random = torch.Generator().manual_seed(0)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random).to(device, shape.dtype)

    batch, pages = random_batch(sequences, page_size)
    layer = LayerPages(0, pages, page_size)
    fill_randomly(layer, batch, shape, numbers)
    tensors = batch_tensors(batch, page_size, 1, device)
    sinks = numbers(shape.heads) if shape.has_sinks else None
    options = AttentionOptions(shape.scale, shape.window, shape.chunk, shape.softcap, sinks)
    query = numbers(batch.tokens, shape.heads, shape.key_dim) / (shape.scale * shape.key_dim**0.5)
    ours = attention(query, layer, tensors, options).float()
    assert layer.keys is not None and layer.values is not None
    wide = replace(layer, keys=layer.keys.float(), values=layer.values.float())
    exact = GatheredAttention()(query.float(), wide, tensors, options)
    error = (ours - exact).norm(dim=-1) / exact.norm(dim=-1)
    return float(error.nan_to_num(torch.inf, torch.inf).max())


def random_batch(parts: Sequence[tuple[int, int]], page_size: int) -> tuple[Batch, int]:
    """Returns a batch with these starts and numbers of new tokens on shuffled pages, and how many pages it uses."""
    counts = [-(-(start + count) // page_size) for start, count in parts]
    order = iter(torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist())
    tables = [tuple(next(order) for _ in range(count)) for count in counts]
    sequences = (
        BatchSequence((0,) * count, start, (table,)) for (start, count), table in zip(parts, tables, strict=True)
    )
    return Batch(tuple(sequences)), sum(counts)


def fill_randomly(layer: LayerPages, batch: Batch, shape: AttentionShape, numbers: Callable[..., torch.Tensor]) -> None:
    """Writes random keys and values for all tokens of the sequences, and NaN everywhere else."""
    layer.reserve(numbers(shape.kv_heads, 1, shape.key_dim), numbers(shape.kv_heads, 1, shape.value_dim))
    for pool in (layer.keys, layer.values):
        assert pool is not None
        pool.fill_(torch.nan)
    size = layer.page_size
    for each in batch.sequences:
        slots = [each.tables[0][position // size] * size + position % size for position in range(each.length)]
        keys, values = (numbers(each.length, shape.kv_heads, dim) for dim in (shape.key_dim, shape.value_dim))
        layer.write(keys, values, torch.tensor(slots, device=keys.device))
