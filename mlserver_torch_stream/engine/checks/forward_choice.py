"""Chooses the forward of a loaded model: our decoder kernels, else transformers' forward and its attention.

Each faster part must give the model's logits; otherwise the next one is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import transformers
from torch import nn

from mlserver_torch_stream.engine.attention.cuda_choice import CudaAttention
from mlserver_torch_stream.engine.attention.torch_attention import torch_attention
from mlserver_torch_stream.engine.cache.paged_cache import LayerPages
from mlserver_torch_stream.engine.checks.expected_logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.selfcheck import SelfCheckResult, check_forward
from mlserver_torch_stream.engine.checks.verify_attention import AttentionChoice, take_attention_kernels
from mlserver_torch_stream.engine.devices import input_device
from mlserver_torch_stream.engine.failures import in_a_line
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.forward.prepacked_linear import pack_linears
from mlserver_torch_stream.engine.loading.quantised import is_quantised
from mlserver_torch_stream.engine.native.compile_kernels import NoKernels
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.quantise import ROUNDED, Rounding, round_weights
from mlserver_torch_stream.engine.native.structure import UnsupportedLayout, read_decoder
from mlserver_torch_stream.engine.stage_log import stage
from mlserver_torch_stream.engine_settings import EngineSettings
from mlserver_torch_stream.errors import LoadFailed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ForwardChoice:
    """``attention`` names what attends in transformers' forward; None: its own code, or our decoder runs instead.

    ``no_kernels`` says why our decoder, which is faster, does not. ``packed``: linear layers that oneDNN has laid out.
    """

    forward: Forward
    attention: str | None = None
    no_kernels: str | None = None
    packed: int = 0


def choose_forward(
    expected: ExpectedLogits, findings: SelfCheckResult, settings: EngineSettings, kernels: KernelOptions
) -> ForwardChoice:
    """``findings`` say that the model can be batched. Raises LoadFailed."""
    model, quantised = expected.model, is_quantised(expected.model)
    if settings.weights in ROUNDED:
        if quantised:
            raise LoadFailed(
                f"parameters.extra.weights: {settings.weights} is for dense weights, this checkpoint is quantised"
            )
        return ForwardChoice(take_rounded(expected, findings, kernels, settings.weights))
    no_kernels = None
    if settings.fast_path == "auto" and not quantised:
        native = take_fast_path(expected, findings, kernels)
        if not isinstance(native, str):
            return ForwardChoice(native)
        no_kernels = native
    if settings.fast_path != "auto":
        return ForwardChoice(ModelForward(model, findings.way))
    forward, attention = with_attention(expected, findings, kernels.cache_dir)
    return ForwardChoice(forward, attention, no_kernels, pack_linears(model))


def with_attention(
    expected: ExpectedLogits,
    findings: SelfCheckResult,
    cache_dir: Path,
    *,
    room: int | None = None,
    together: Callable[[bool], bool] = bool,
) -> tuple[ModelForward, str | None]:
    """Returns transformers' forward with the fastest attention that gives the model's logits, and its name.

    ``room`` is that of ``check_forward``. ``together``: whether this holds on all ranks, which choose at the same time.
    """
    model, way = expected.model, findings.way
    if way is Way.MASKED_ROWS:
        return ModelForward(model, way), None
    choice = choose_attention(model, findings, cache_dir)
    if together(choice.attention is not torch_attention):
        forward = ModelForward(model, way, choice.attention, choice.write)
        problem = _problem(expected, forward, findings, room)
        if together(problem is None):
            more = f" ({choice.attention.summary})" if isinstance(choice.attention, CudaAttention) else ""
            return forward, f"{choice.name}{more}"
        logger.warning("%s: not used, torch computes attention: %s", choice.name, problem or "another rank cannot")
    elif choice.attention is torch_attention:
        return ModelForward(model, way), choice.name
    return ModelForward(model, way), "torch's attention"


def choose_attention(
    model: transformers.PreTrainedModel, findings: SelfCheckResult, cache_dir: Path
) -> AttentionChoice:
    """Returns what attends on the devices that hold the pages: weights that are moved compute there, too."""
    kinds = {device.type for device in findings.specs}
    if kinds == {"cuda"}:
        return AttentionChoice(CudaAttention(), LayerPages.write, "attention on CUDA")
    if kinds == {"cpu"}:
        return take_attention_kernels(model, torch_attention, cache_dir, findings.way, findings.page_size)
    return AttentionChoice(torch_attention, LayerPages.write, "torch's attention")


def _problem(
    expected: ExpectedLogits, forward: ModelForward, findings: SelfCheckResult, room: int | None
) -> str | None:
    size = findings.page_size
    # What attends on CUDA is chosen by the size of pages: the choice of the engine's pages is to be checked.
    small = {"small_page": size} if isinstance(forward.attention, CudaAttention) else {}
    try:
        return check_forward(
            expected.model,
            forward,
            expected=expected,
            room=room,
            page_size=size,
            chunked=findings.chunked,
            **small,
        )
    except Exception as error:  # kernels of torch's or of a compiler can raise any error
        return in_a_line(error)


def take_fast_path(expected: ExpectedLogits, findings: SelfCheckResult, kernels: KernelOptions) -> NativeForward | str:
    """Returns the verified forward and frees the model's own weights; or returns why there is none, in one line.

    Raises LoadFailed if the environment names kernels that this CPU does not run.
    """
    forward = _verified(expected, findings, kernels)
    if isinstance(forward, str):
        # The kernels are for CPUs: on a GPU their absence is normal.
        level = logging.WARNING if input_device(expected.model).type == "cpu" else logging.INFO
        logger.log(level, "our own kernels are not used, transformers' forward runs: %s", forward)
    return forward


def take_rounded(
    expected: ExpectedLogits, findings: SelfCheckResult, kernels: KernelOptions, weights: str
) -> NativeForward:
    """Returns the verified forward with the weights rounded to int8 or int4, and frees the model's own weights.

    Raises LoadFailed if there is none: no other forward can use such weights.
    """
    forward = findings.problem or _verified(expected, findings, kernels, ROUNDED[weights])
    if isinstance(forward, str):
        raise LoadFailed(f"parameters.extra.weights: {weights} cannot be used for this model here: {forward}")
    return forward


def _verified(
    expected: ExpectedLogits,
    findings: SelfCheckResult,
    kernels: KernelOptions,
    rounded: Rounding | None = None,
) -> NativeForward | str:
    model = expected.model
    try:
        forward = NativeForward(model, kernels, rounded)
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
