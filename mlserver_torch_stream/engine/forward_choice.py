"""Chooses the forward of a loaded model: our decoder kernels, else transformers' forward and what attends in it.

Knows nothing of engines. Each faster part must give the model's logits; otherwise the next one is taken.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from mlserver_torch_stream.engine.attention.cuda_choice import CudaAttention
from mlserver_torch_stream.engine.attention.paged_attention import PagedAttention
from mlserver_torch_stream.engine.attention.torch_attention import torch_attention
from mlserver_torch_stream.engine.attention.verify_attention import take_attention_kernels
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward, Way
from mlserver_torch_stream.engine.forward.prepacked_linear import pack_linears
from mlserver_torch_stream.engine.loading.expected_logits import ExpectedLogits
from mlserver_torch_stream.engine.loading.quantised import is_quantised
from mlserver_torch_stream.engine.loading.selfcheck import SelfCheckResult, check_forward
from mlserver_torch_stream.engine.native.verify_native import take_fast_path, take_int8
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import EngineSettings

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
    expected: ExpectedLogits, findings: SelfCheckResult, settings: EngineSettings, threads: int, cache_dir: Path
) -> ForwardChoice:
    """``findings`` say that the model can be batched. Raises LoadFailed."""
    model, quantised = expected.model, is_quantised(expected.model)
    if settings.weights == "int8":
        if quantised:
            raise LoadFailed("parameters.extra.weights: int8 is for dense weights, this checkpoint is quantised")
        return ForwardChoice(take_int8(expected, findings, threads, cache_dir))
    no_kernels = None
    if settings.fast_path == "auto" and not quantised:
        taken = take_fast_path(expected, findings, threads, cache_dir)
        if not isinstance(taken, str):
            return ForwardChoice(taken)
        no_kernels = taken
    if settings.fast_path != "auto":
        return ForwardChoice(ModelForward(model, findings.way))
    forward, attention = _with_attention(expected, findings, cache_dir)
    return ForwardChoice(forward, attention, no_kernels, pack_linears(model))


def _with_attention(
    expected: ExpectedLogits, findings: SelfCheckResult, cache_dir: Path
) -> tuple[ModelForward, str | None]:
    """Returns transformers' forward with the fastest attention that gives the model's logits, and its name."""
    model, way = expected.model, findings.way
    if way is Way.MASKED_ROWS:
        return ModelForward(model, way), None
    attention, name = _attention(model, findings, cache_dir)
    forward = ModelForward(model, way, attention)
    if attention is not torch_attention and (problem := _problem(expected, forward, findings)) is not None:
        logger.warning("not %s, torch attends: %s", name, problem)
        return ModelForward(model, way), "torch's attention"
    return forward, name


def _attention(model: PreTrainedModel, findings: SelfCheckResult, cache_dir: Path) -> tuple[PagedAttention, str]:
    kinds = {device.type for device in findings.specs}
    if kinds == {"cuda"}:
        return CudaAttention(), "attention on CUDA"
    if kinds == {"cpu"}:
        choice = take_attention_kernels(model, torch_attention, cache_dir, findings.way, findings.page_size)
        return choice.attention, choice.name
    return torch_attention, "torch's attention"


def _problem(expected: ExpectedLogits, forward: Forward, findings: SelfCheckResult) -> str | None:
    try:
        return check_forward(
            expected.model, forward, expected=expected, page_size=findings.page_size, chunked=findings.chunked
        )
    except Exception as error:  # kernels of torch's or of a compiler can raise any error
        return f"{type(error).__name__}: {error}".splitlines()[0]
