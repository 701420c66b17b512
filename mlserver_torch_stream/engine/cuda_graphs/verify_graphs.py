"""Decides at load whether a model's decode steps are replayed: they must be recordable and give its logits.

Knows nothing of engines. Whatever goes wrong here, transformers' forward is there.
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
from mlserver_torch_stream.engine.loading.comparison import logits_tolerance
from mlserver_torch_stream.engine.loading.selfcheck import check_forward
from mlserver_torch_stream.engine.pipeline.stage_locks import Pipeline
from mlserver_torch_stream.engine.pipeline.verify_concurrency import check_pipeline, logits_error

logger = logging.getLogger(__name__)

_PROMPT = [1, 2, 3, 4, 5]


def take_graphs(model: PreTrainedModel, max_rows: int, pipeline: Pipeline | None) -> GraphForward | None:
    """The verified forward, for a model that is on CUDA devices; or None, and one line in the log says why.

    Several devices need a ``pipeline``, which says what is whose.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if not any(device.type == "cuda" for device in devices):
        return None
    if {device.type for device in devices} != {"cuda"} or (len(devices) > 1 and pipeline is None):
        logger.info("no CUDA graphs: weights are moved, or devices work one after another")
        return None
    forward = verified(model, CudaGraphCapture(), max_rows, pipeline)
    if forward is None:
        torch.cuda.empty_cache()  # what was laid aside for it would count as taken
    return forward


def verified(
    model: PreTrainedModel, recorder: GraphCapture, max_rows: int, pipeline: Pipeline | None = None
) -> GraphForward | None:
    """Never raises for what the model does."""
    try:
        forward = GraphForward(model, recorder, max_rows, pipeline)
        problem = check_forward(model, forward) or _check_sizes(model, forward)
        if problem is None and pipeline is not None:
            problem = check_pipeline(model, pipeline, forward)
    except Exception as error:  # whatever a model's code raises while it is recorded
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    if problem is None:
        return forward
    logger.info("no CUDA graphs, transformers' forward runs: %s", problem)
    return None


def _check_sizes(model: PreTrainedModel, forward: GraphForward) -> str | None:
    """The other check has few rows. Here each recording is full, of rows that are all alike."""
    layout, plain = CacheLayout(model.config), ModelForward(model)
    prompt = layout.cache(capacity=len(_PROMPT))
    prompt.begin_row()
    plain([_PROMPT], prompt)
    expected = _next(plain, layout, prompt, 1)
    for rows in forward.sizes:
        error = logits_error(expected.expand(rows, -1), _next(forward, layout, prompt, rows))
        if error > logits_tolerance(expected.dtype):
            return f"logits of {rows} rows differ from the model's by {error:.3g} standard deviations"
    return None


def _next(forward: Forward, layout: CacheLayout, prompt: RowCache, rows: int) -> torch.Tensor:
    batch = layout.cache(rows, len(_PROMPT) + 1)
    batch.join(prompt, rows)
    return forward([_PROMPT[:1]] * rows, batch)
