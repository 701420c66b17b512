"""Selects the decoder kernels for a model as a load does."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from mlserver_torch_stream.engine.checks.forward_choice import take_kernels
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward


def kernels_of(model: PreTrainedModel, folder: Path) -> NativeForward | str:
    """Returns the forward if it passes the check, otherwise the reason why there is none."""
    expected = ExpectedLogits(model)
    verdict = take_kernels(expected, check_batching(model, expected=expected), KernelOptions(1, folder))
    return verdict.candidate or verdict.reason
