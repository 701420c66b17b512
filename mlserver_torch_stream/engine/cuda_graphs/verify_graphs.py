"""Decides at load whether a model's decode steps are replayed: they must be capturable and give the model's logits.

Knows nothing of engines. If anything fails here, transformers' forward runs.
"""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.cuda_graphs.graph_capture import CudaGraphCapture, GraphCapture
from mlserver_torch_stream.engine.cuda_graphs.graph_forward import GraphForward
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.kv_cache.row_cache import CacheLayout, RowCache
from mlserver_torch_stream.engine.loading.comparison import Comparison, in_deviations
from mlserver_torch_stream.engine.loading.selfcheck import check_forward
from mlserver_torch_stream.engine.pipeline.stage_locks import Pipeline
from mlserver_torch_stream.engine.pipeline.verify_concurrency import check_pipeline

logger = logging.getLogger(__name__)

_PROMPT = [1, 2, 3, 4, 5]


def take_graphs(model: PreTrainedModel, max_batch_size: int, pipeline: Pipeline | None) -> GraphForward | None:
    """Returns the verified forward of a model on CUDA devices, or None; then the log has the reason in one line.

    Several devices need a ``pipeline``, which knows the modules of each.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if not any(device.type == "cuda" for device in devices):
        return None
    if {device.type for device in devices} != {"cuda"} or (len(devices) > 1 and pipeline is None):
        logger.info("no CUDA graphs: weights are moved, or devices work one after another")
        return None
    forward = verified(model, CudaGraphCapture(), max_batch_size, pipeline)
    if forward is None:
        torch.cuda.empty_cache()  # otherwise the memory of its pools counts as used
    return forward


def verified(
    model: PreTrainedModel, capture: GraphCapture, max_batch_size: int, pipeline: Pipeline | None = None
) -> GraphForward | None:
    """Returns None if the model's code raises or gives other logits."""
    try:
        forward = GraphForward(model, capture, max_batch_size, pipeline)
        problem = check_forward(model, forward) or _check_batch_sizes(model, forward)
        if problem is None and pipeline is not None:
            problem = check_pipeline(model, pipeline, forward)
    except Exception as error:  # a model's code can raise any error during a capture
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    if problem is None:
        return forward
    logger.info("no CUDA graphs, transformers' forward runs: %s", problem)
    return None


def _check_batch_sizes(model: PreTrainedModel, forward: GraphForward) -> str | None:
    """Fills each captured step with equal rows; ``check_forward`` has few rows."""
    layout, plain = CacheLayout(model.config), ModelForward(model)
    prompt = layout.cache(capacity=len(_PROMPT))
    prompt.begin_row()
    plain([_PROMPT], prompt)
    expected = _next_logits(plain, layout, prompt, 1)
    for rows in forward.batch_sizes:
        comparison = Comparison()
        comparison.add(expected.expand(rows, -1), _next_logits(forward, layout, prompt, rows))
        if (error := comparison.error) is not None:
            return f"logits of {rows} rows differ from the model's by {in_deviations(error)}"
    return None


def _next_logits(forward: Forward, layout: CacheLayout, prompt: RowCache, rows: int) -> torch.Tensor:
    batch = layout.cache(rows, len(_PROMPT) + 1)
    batch.join(prompt, rows)
    return forward([_PROMPT[:1]] * rows, batch)
