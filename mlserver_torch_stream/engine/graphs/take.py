"""Decides at load whether a model's decode steps are replayed: they must be recordable and give its logits.

Knows nothing of engines. Whatever goes wrong here, transformers' forward is there.
"""

from __future__ import annotations

import logging

from transformers import PreTrainedModel

from mlserver_torch_stream.engine.graphs.forward import GraphForward
from mlserver_torch_stream.engine.graphs.recorder import CudaRecorder, Recorder
from mlserver_torch_stream.engine.loading.selfcheck import check_forward

logger = logging.getLogger(__name__)


def take_graphs(model: PreTrainedModel, max_rows: int) -> GraphForward | None:
    """The verified forward, for a model that is on one CUDA device; or None, and one line in the log says why."""
    devices = {parameter.device for parameter in model.parameters()}
    if {device.type for device in devices} != {"cuda"}:
        return None
    if len(devices) > 1:
        logger.info("no CUDA graphs: the model is on %d devices", len(devices))
        return None
    return verified(model, CudaRecorder(devices.pop()), max_rows)


def verified(model: PreTrainedModel, recorder: Recorder, max_rows: int) -> GraphForward | None:
    """Never raises for what the model does."""
    try:
        forward = GraphForward(model, recorder, max_rows)
        problem = check_forward(model, forward)
    except Exception as error:  # whatever a model's code raises while it is recorded
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    if problem is None:
        return forward
    logger.info("no CUDA graphs, transformers' forward runs: %s", problem)
    return None
