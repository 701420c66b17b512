"""Decides at load whether a model runs on our own kernels: they must exist, know its layout and give its logits.

Knows nothing of engines. Whatever goes wrong here, transformers' forward is there.
"""

from __future__ import annotations

import logging
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.loading.selfcheck import check_forward
from mlserver_torch_stream.engine.native.compile import NoKernels
from mlserver_torch_stream.engine.native.forward import NativeForward
from mlserver_torch_stream.engine.native.structure import Unsupported

logger = logging.getLogger(__name__)


def take_fast_path(model: PreTrainedModel, threads: int, cache_dir: Path) -> NativeForward | None:
    """The verified forward, with the model's own weights given back; or None, and one line in the log says why."""
    try:
        forward = NativeForward(model, threads, cache_dir)
        problem = check_forward(model, forward)
    except (NoKernels, Unsupported) as error:
        problem = str(error)
    except Exception as error:  # a model's code may raise anything when it is looked into
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    if problem is None:
        release_weights(model)
        return forward
    logger.info("no fast path, transformers' forward runs: %s", problem)
    return None


def release_weights(model: nn.Module) -> None:
    """Frees the parameters that the kernels have copies of. Their shapes stay, and a stray use of them raises."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
