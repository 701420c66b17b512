"""Decides at load whether a model's decode steps are replayed: they must be recordable and give its logits.

Knows nothing of engines. Whatever goes wrong here, transformers' forward is there.
"""

from __future__ import annotations

import logging

from transformers import PreTrainedModel

from mlserver_torch_stream.engine.graphs.forward import GraphForward
from mlserver_torch_stream.engine.graphs.recorder import CudaRecorder, Recorder
from mlserver_torch_stream.engine.loading.selfcheck import check_forward
from mlserver_torch_stream.engine.pipeline.check import check_pipeline
from mlserver_torch_stream.engine.pipeline.passage import Pipeline

logger = logging.getLogger(__name__)


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
    return verified(model, CudaRecorder(), max_rows, pipeline)


def verified(
    model: PreTrainedModel, recorder: Recorder, max_rows: int, pipeline: Pipeline | None = None
) -> GraphForward | None:
    """Never raises for what the model does."""
    try:
        forward = GraphForward(model, recorder, max_rows, pipeline)
        problem = check_forward(model, forward)
        if problem is None and pipeline is not None:
            problem = check_pipeline(model, pipeline, forward)
    except Exception as error:  # whatever a model's code raises while it is recorded
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    if problem is None:
        return forward
    logger.info("no CUDA graphs, transformers' forward runs: %s", problem)
    return None
