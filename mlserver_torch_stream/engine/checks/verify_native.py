"""Decides at load whether a model runs on our own kernels: they must know its layout and give its logits.

If anything fails here, transformers' forward runs, unless the settings ask for weights that only the kernels read.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mlserver_torch_stream.engine.checks.expected_logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.selfcheck import SelfCheckResult, check_forward, check_kernels
from mlserver_torch_stream.engine.comparison import in_a_line
from mlserver_torch_stream.engine.devices import input_device
from mlserver_torch_stream.engine.loading.gguf_packed import NotPacked
from mlserver_torch_stream.engine.machine import trim_heap
from mlserver_torch_stream.engine.native.compile_kernels import NoKernels
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.quantise import ROUNDED, Rounding, round_weights
from mlserver_torch_stream.engine.native.structure import Decoder, UnsupportedLayout, read_decoder
from mlserver_torch_stream.engine.stage_log import stage
from mlserver_torch_stream.errors import LoadFailed

logger = logging.getLogger(__name__)


def take_fast_path(
    expected: ExpectedLogits, findings: SelfCheckResult, threads: int, cache_dir: Path
) -> NativeForward | str:
    """Returns the verified forward and frees the model's own weights; or returns why there is none, in one line.

    Raises LoadFailed if the environment names kernels that this CPU does not run.
    """
    taken = _verified(expected, findings, threads, cache_dir)
    if isinstance(taken, str):
        # The kernels are for CPUs: on a GPU their absence is normal.
        level = logging.WARNING if input_device(expected.model).type == "cpu" else logging.INFO
        logger.log(level, "our own kernels are not used, transformers' forward runs: %s", taken)
    return taken


def take_rounded(
    expected: ExpectedLogits, findings: SelfCheckResult, threads: int, cache_dir: Path, weights: str
) -> NativeForward:
    """Returns the verified forward with the weights rounded to int8 or int4, and frees the model's own weights.

    Raises LoadFailed if there is none: no other forward can use such weights.
    """
    taken = findings.problem or _verified(expected, findings, threads, cache_dir, ROUNDED[weights])
    if isinstance(taken, str):
        raise LoadFailed(f"parameters.extra.weights: {weights} cannot be used for this model here: {taken}")
    return taken


def verify_packed(model: Any, decoder: Decoder, threads: int, cache_dir: Path) -> tuple[NativeForward, SelfCheckResult]:
    """Returns the kernels' forward of ``decoder``, after comparing its logits with those of ``model``.

    ``gguf_packed`` has loaded the model.

    Raises NotPacked, or LoadFailed as ``take_fast_path`` does.
    """
    try:
        forward = NativeForward(decoder, threads, cache_dir)
        trim_heap()  # packing frees 13 MB
        with stage(logger, "Comparing the logits of the kernels with those of transformers"):
            # transformers computes in float32, so the difference is the rounding of activations to int8.
            findings = check_kernels(ExpectedLogits(model, torch.int8), forward)
    except (NoKernels, UnsupportedLayout) as error:
        raise NotPacked(str(error)) from None
    if findings.problem is not None:
        raise NotPacked(findings.problem)
    return forward, findings


def _verified(
    expected: ExpectedLogits,
    findings: SelfCheckResult,
    threads: int,
    cache_dir: Path,
    rounded: Rounding | None = None,
) -> NativeForward | str:
    model = expected.model
    try:
        forward = NativeForward(model, threads, cache_dir, rounded)
        if rounded is not None:  # the same rounding in transformers' forward lets the check be as strict as otherwise
            round_weights(read_decoder(model), rounded)
            expected = ExpectedLogits(model)
        with stage(logger, "Comparing the logits of the kernels with those of transformers"):
            problem = check_forward(
                model, forward, expected=expected, page_size=findings.page_size, chunked=findings.chunked
            )
    except LoadFailed:
        raise
    except (NoKernels, UnsupportedLayout) as error:
        problem = str(error)
    except Exception as error:  # a model's code can raise any error
        problem = in_a_line(error)
    if problem is not None:
        return problem
    release_weights(model)
    return forward


def release_weights(model: nn.Module) -> None:
    """Frees the parameters that the kernels have copies of. Their shapes stay, and a later use of them raises."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
