"""Chooses the forward of a loaded model: our decoder's, or else transformers' with the fastest attention that works.

A faster forward or attention is used only if it reproduces the model's logits; otherwise the next candidate is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from mlserver_torch_stream.engine.attention.gathered import GatheredAttention
from mlserver_torch_stream.engine.checks.attention import choose_attention
from mlserver_torch_stream.engine.checks.harness import Verdict, accepted
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.selfcheck import SMALL_PAGE, SameLogits, SelfCheckResult
from mlserver_torch_stream.engine.devices import input_device
from mlserver_torch_stream.engine.forward.interface import LoadedForward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.loading.quantised import is_quantised
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.prepacked_linear import pack_linears
from mlserver_torch_stream.engine.native.quantise import ROUNDED, round_weights
from mlserver_torch_stream.engine.native.structure import read_decoder
from mlserver_torch_stream.engine_settings import EngineSettings
from mlserver_torch_stream.errors import LoadFailed

logger = logging.getLogger(__name__)

_NOT_OURS = "transformers' forward runs, because our own kernels are not used"


@dataclass(frozen=True, slots=True)
class ForwardChoice:
    """The forward of a loaded model. ``no_kernels`` says why the forward is not our faster decoder.

    ``packed`` is the number of linear layers by whose packed weights our kernels multiply. ``judged`` says whether
    ``no_kernels`` is the finding of a comparison, as in ``Verdict``.
    """

    forward: LoadedForward
    no_kernels: str | None = None
    packed: int = 0
    judged: bool = False


def choose_forward(
    expected: ExpectedLogits,
    findings: SelfCheckResult,
    settings: EngineSettings,
    kernels: KernelOptions,
    refused: str | None = None,
) -> ForwardChoice:
    """Chooses the forward of a model for which ``findings`` say that it can be batched.

    ``refused`` says why an earlier load of the model refused our decoder; None means that the decoder is checked now.
    Raises LoadFailed if the settings ask for rounded weights and the model cannot have them.
    """
    model, quantised = expected.model, is_quantised(expected.model)
    if settings.weights in ROUNDED:
        if quantised:
            raise LoadFailed(
                f"parameters.extra.weights: {settings.weights} is for dense weights, but this checkpoint is quantised"
            )
        return ForwardChoice(take_rounded(expected, findings, kernels, settings.weights))
    if settings.fast_path != "auto":
        return ForwardChoice(ModelForward(model, findings.way))
    no_kernels, judged = refused, False
    if refused is not None:
        logger.warning("%s: %s", _NOT_OURS, refused)
    elif not quantised:
        native = take_kernels(expected, findings, kernels)
        if native.candidate is not None:
            return ForwardChoice(native.candidate)
        no_kernels, judged = native.reason, native.judged
    forward = with_attention(expected, findings, kernels.cache_dir)
    return ForwardChoice(forward, no_kernels, pack_linears(model, kernels), judged)


def with_attention(
    expected: ExpectedLogits,
    findings: SelfCheckResult,
    cache_dir: Path,
    *,
    room: int | None = None,
    together: Callable[[bool], bool] = bool,
) -> ModelForward:
    """Returns transformers' forward with the fastest attention that reproduces the model's logits.

    ``room`` is passed to ``SameLogits``. ``together(true)`` returns whether ``true`` is True on all ranks, which choose
    at the same time.
    """
    model, way = expected.model, findings.way
    if way is Way.MASKED_ROWS:
        return ModelForward(model, way)
    attention = choose_attention(model, findings, cache_dir)
    reason = attention.reason
    if together(attention.candidate is not None):
        assert attention.candidate is not None
        what = attention.candidate.describe()
        small = max(SMALL_PAGE, attention.candidate.page_multiple)
        check = SameLogits[ModelForward](expected, findings.page_size, small, findings.chunked, room, way)
        make = partial(ModelForward, model, way, attention.candidate)
        forward = accepted(f"the logits with {what}", make, check, f"torch's operators are used instead of {what}")
        if together(forward.candidate is not None):
            assert forward.candidate is not None
            return forward.candidate
        reason = forward.reason
    return ModelForward(model, way, GatheredAttention(reason or "another rank cannot use the kernels"))


def take_kernels(
    expected: ExpectedLogits, findings: SelfCheckResult, kernels: KernelOptions, weights: str | None = None
) -> Verdict[NativeForward]:
    """Returns our decoder, with weights rounded to the format ``weights`` if given, and frees the model's own weights.

    Raises LoadFailed if the environment names kernels that this CPU does not run.
    """
    model, rounding = expected.model, None
    otherwise = _NOT_OURS
    if weights is not None:
        rounding, otherwise = ROUNDED[weights], ""

    def make() -> NativeForward:
        forward = NativeForward(model, kernels, rounding)
        if rounding is not None:  # with the same rounding in transformers' forward the check can be strict
            round_weights(read_decoder(model), rounding)
        return forward

    check = SameLogits[NativeForward](
        expected if rounding is None else ExpectedLogits(model, torch.int8),  # so activations are rounded
        findings.page_size,
        chunked=findings.chunked,
        rounding=weights,
    )
    # The kernels are for CPUs: on a GPU their absence is normal.
    level = logging.WARNING if input_device(model).type == "cpu" else logging.INFO
    verdict = accepted("the logits of our kernels", make, check, otherwise, level)
    if verdict.candidate is not None:
        release_weights(model)
    return verdict


def take_rounded(
    expected: ExpectedLogits, findings: SelfCheckResult, kernels: KernelOptions, weights: str
) -> NativeForward:
    """Returns our decoder with the weights rounded to int8 or int4, and frees the model's own weights.

    Raises LoadFailed if our decoder cannot be used, because no other forward can use rounded weights.
    """
    if (reason := findings.problem) is None:
        verdict = take_kernels(expected, findings, kernels, weights)
        if verdict.candidate is not None:
            return verdict.candidate
        reason = verdict.reason
    raise LoadFailed(f"parameters.extra.weights: {weights} cannot be used for this model here: {reason}")


def release_weights(model: nn.Module) -> None:
    """Frees the parameters that the kernels have copied.

    Their shapes stay readable; reading their values raises an error.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
