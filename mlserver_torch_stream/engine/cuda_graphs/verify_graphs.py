"""Decides at load whether decode steps are replayed: they must be capturable and give the forward's own logits.

The plain forward has passed its checks before. If anything fails here, it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext

import torch

from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import LayerGroup
from mlserver_torch_stream.engine.comparison import Comparison
from mlserver_torch_stream.engine.cuda_graphs.graph_capture import GraphCapture
from mlserver_torch_stream.engine.cuda_graphs.graph_forward import AllOrNone, CannotCapture, GraphForward
from mlserver_torch_stream.engine.cuda_graphs.step_shape import StepShape
from mlserver_torch_stream.engine.failures import in_a_line
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.pipeline.stages import Pipeline

logger = logging.getLogger(__name__)

Check = Callable[[Forward], "str | None"]
"""Returns why a forward must not be used; None if it may."""


def take_graphs(
    forward: ModelForward,
    cache: PagedCache,
    max_sequences: int,
    longest: int,
    capture_on: Callable[[str], GraphCapture | None],
    *,
    copies_keys: bool = False,
    pipeline: Pipeline | None = None,
    check: Check | None = None,
) -> GraphForward | None:
    """Returns the verified forward over an engine's cache, or None; on CUDA devices the log has the reason in one line.

    ``cache`` must hold no sequences. ``longest``: tokens of the longest sequence. ``capture_on`` is that of
    ``graph_capture``. ``copies_keys``: as in ``CudaAttention``. Several devices need a ``pipeline``, which knows the
    modules of each, and a ``check`` of forwards that overlap.
    """
    devices = forward.devices
    kinds = {device.type for device in devices}
    capture = capture_on(kinds.pop()) if len(kinds) == 1 else None
    if capture is None or (len(devices) > 1 and pipeline is None):
        if any(device.type == "cuda" for device in devices):
            logger.info("no CUDA graphs: weights are moved, or devices work one after another")
        return None
    widths = table_widths(-(-longest // cache.page_size), copies_keys)
    taken = verified(forward, cache, capture, max_sequences, widths, pipeline, check)
    if taken is None:
        torch.cuda.empty_cache()  # otherwise the memory of its pools counts as used
    return taken


def table_widths(most: int, copies_keys: bool) -> list[int]:
    """Returns the widths of block tables to capture: ``most`` pages, and fewer where attention copies whole tables."""
    narrow = (4**power for power in range(1, 16)) if copies_keys else ()
    return [*(width for width in narrow if width < most), most]


def verified(
    forward: ModelForward,
    cache: PagedCache,
    capture: GraphCapture,
    max_sequences: int,
    widths: list[int],
    pipeline: Pipeline | None = None,
    check: Check | None = None,
    all_or_none: AllOrNone = nullcontext,
) -> GraphForward | None:
    """Returns None if the model's code raises or replays give other logits, with ``all_or_none`` on any rank."""
    try:
        graphs = GraphForward(forward, cache, capture, max_sequences, widths, pipeline, all_or_none)
        _compare(graphs, all_or_none)
        problem = None if check is None else check(graphs)
    except Exception as error:  # a model's code can raise any error during a capture
        problem = in_a_line(error)
    if problem is None:
        return graphs
    logger.info("no CUDA graphs, the plain forward runs: %s", problem)
    return None


def _compare(graphs: GraphForward, all_or_none: AllOrNone) -> None:
    """Compares each captured step with the forward, on the same pages: full and with unused rows, near and far.

    Raises CannotCapture.
    """
    _fill(graphs.cache)
    for shape in graphs.shapes:
        for trial, rows in enumerate((shape.rows, shape.rows // 2 + 1, shape.rows)):
            with all_or_none():
                _compare_step(graphs, _batch(graphs.cache, shape, rows, trial))


def _compare_step(graphs: GraphForward, batch: Batch) -> None:
    comparison = Comparison()
    plain, replayed = graphs.forward(batch, graphs.cache).tensor, graphs(batch, graphs.cache).tensor
    for expected, got in zip(plain, replayed, strict=True):
        comparison.add(expected, got)
    if (by := comparison.difference) is not None:
        count, position = len(batch.sequences), batch.sequences[0].start
        raise CannotCapture(f"logits of {count} sequences, one at position {position}, differ by {by}")


def _fill(cache: PagedCache) -> None:
    """Writes random keys and values to all pages: fresh memory of a pool may hold NaN."""
    for layer in cache.layers.values():
        if layer.keys is not None and layer.values is not None:
            layer.keys.normal_()
            layer.values.normal_()


_NEAR = 2  # the trial without a long sequence


def _batch(cache: PagedCache, shape: StepShape, rows: int, trial: int) -> Batch:
    """Returns sequences on pages of their own, around a page's end.

    Before the last trial the first is as long as its table or the cache allows: a model's code may decide by the
    longest.
    """
    size = shape.page_size
    pages = min(layer.pages for layer in cache.layers.values())
    rows = min(rows, pages)
    each = 2 if shape.width > 1 and pages >= 2 * rows else 1  # pages of all but the first
    sequences, first = [], 0
    for row in range(rows):
        if row == 0 and trial < _NEAR:
            length = min(shape.width, pages - each * (rows - 1)) * size - trial
        else:
            length = (1, each * size, (each - 1) * size + 1, each * size - 1)[(row + trial) % 4]
        length = max(1, length)
        count = -(-length // size)
        tables = tuple(_table(group, range(first, first + count), length, size) for group in cache.groups)
        sequences.append(BatchSequence(((row + 7 * trial) % 5,), length - 1, tables))
        first += count
    return Batch(tuple(sequences))


def _table(group: LayerGroup, pages: range, length: int, size: int) -> tuple[int, ...]:
    passed = group.oldest_seen(length - 1) // size
    return tuple(-1 if index < passed else page for index, page in enumerate(pages))
