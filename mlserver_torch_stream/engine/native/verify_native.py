"""Decides at load whether a model runs on our own kernels: they must exist, know its layout and give its logits.

Knows nothing of engines. Whatever goes wrong here, transformers' forward is there, unless int8 weights were asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.forward.model_forward import input_device
from mlserver_torch_stream.engine.loading.selfcheck import SelfCheckResult, check_forward
from mlserver_torch_stream.engine.loading.stage_log import stage
from mlserver_torch_stream.engine.native.compile_kernels import NoKernels
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.quantise import round_weights
from mlserver_torch_stream.engine.native.structure import UnsupportedLayout, read_decoder
from mlserver_torch_stream.errors import LoadFailed

logger = logging.getLogger(__name__)


def take_fast_path(model: PreTrainedModel, threads: int, cache_dir: Path) -> NativeForward | str:
    """The verified forward, with the model's own weights given back; or why there is none, in one line."""
    taken = _try(model, lambda: _as_it_is(model, threads, cache_dir))
    if isinstance(taken, str):
        # On a GPU the kernels, which are for CPUs, are missed by nobody.
        level = logging.WARNING if input_device(model).type == "cpu" else logging.INFO
        logger.log(level, "no fast path, transformers' forward runs: %s", taken)
    return taken


def take_int8(model: PreTrainedModel, findings: SelfCheckResult, threads: int, cache_dir: Path) -> NativeForward:
    """The same with weights in int8. Nothing stands in for it: raises LoadFailed."""
    problem = findings.problem
    taken = problem if problem is not None else _try(model, lambda: _rounded(model, threads, cache_dir))
    if isinstance(taken, NativeForward):
        return taken
    raise LoadFailed(f"parameters.extra.weights: int8 is not to be had for this model here: {taken}")


def _try(model: PreTrainedModel, make: Callable[[], tuple[NativeForward, str | None]]) -> NativeForward | str:
    """The forward, or what is against it."""
    try:
        forward, problem = make()
    except (NoKernels, UnsupportedLayout) as error:
        problem = str(error)
    except Exception as error:  # a model's code may raise anything when it is looked into
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    if problem is not None:
        return problem
    release_weights(model)
    return forward


def _as_it_is(model: PreTrainedModel, threads: int, cache_dir: Path) -> tuple[NativeForward, str | None]:
    forward = NativeForward(model, threads, cache_dir)
    return forward, _check(model, forward)


def _rounded(model: PreTrainedModel, threads: int, cache_dir: Path) -> tuple[NativeForward, str | None]:
    """Compared with transformers' forward on the same rounded weights, so that the check may be as strict as ever."""
    forward = NativeForward(model, threads, cache_dir, int8=True)
    round_weights(read_decoder(model))
    return forward, _check(model, forward)


def _check(model: PreTrainedModel, forward: NativeForward) -> str | None:
    with stage(logger, "Comparing the logits of the kernels with those of transformers"):
        return check_forward(model, forward)


def release_weights(model: nn.Module) -> None:
    """Frees the parameters that the kernels have copies of. Their shapes stay, and a stray use of them raises."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
