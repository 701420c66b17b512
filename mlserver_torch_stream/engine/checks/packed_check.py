"""Loads packed weights into transformers' model, and checks that our kernels give its logits with them.

``engine.model`` runs this in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.pages import CPU_PAGE_SIZE
from mlserver_torch_stream.engine.checks.harness import accepted
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.selfcheck import SameLogits, SelfCheckResult
from mlserver_torch_stream.engine.config_fields import comparable_context, plain_config
from mlserver_torch_stream.engine.failures import UnsupportedLayout
from mlserver_torch_stream.engine.loading.gguf_packed import NotPacked, load_packed
from mlserver_torch_stream.engine.loading.loader import LoadedWeights, describe
from mlserver_torch_stream.engine.loading.placement import DeviceShare, read_placement
from mlserver_torch_stream.engine.machine import trim_heap
from mlserver_torch_stream.engine.native.decoder_pickle import pickle_decoder, unpickle_decoder
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.structure import Decoder, read_decoder


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """Stands for transformers' model where our kernels have the whole forward: only its config is read, a plain one."""

    config: PreTrainedConfig


@dataclass(frozen=True, slots=True)
class CheckedWeights:
    """What a process without transformers' modeling code needs to run packed weights that were checked.

    ``decoder`` is that of ``pickle_decoder``. The ``model`` of ``weights`` is a ``ModelOutline``. ``variant``: of the
    kernels.
    """

    decoder: bytes
    weights: LoadedWeights
    findings: SelfCheckResult
    placement: tuple[DeviceShare, ...]
    variant: str


def check_packed(folder: Path, name: str, kernels: KernelOptions) -> CheckedWeights:
    """``folder`` is one of ``gguf_packed``, ``name`` the model's. Raises NotPacked or LoadFailed."""
    torch.set_num_threads(kernels.threads)
    with torch.inference_mode():
        packed = load_packed(folder)
        model, placement = packed.model, read_placement(packed.model)
        description, vocab_size = describe(name, model, packed.description), len(model.get_input_embeddings().weight)
        try:
            decoder = pickle_decoder(read_decoder(model), packed.tensors)
        except UnsupportedLayout as error:
            raise NotPacked(str(error)) from None
        outline = ModelOutline(plain_config(vars(model.config)))
        if any(part(outline) != part(model) for part in (_cache_groups, comparable_context)):
            raise NotPacked(f"its cache or its context needs {type(model.config).__name__}")
        # What is checked is what the other process runs: the decoder as it is read from the pickle and the file.
        read = unpickle_decoder(decoder, packed.tensors.__getitem__)
        forward, findings = verify_packed(model, read, kernels)
    weights = LoadedWeights(outline, model.generation_config, vocab_size, description)
    return CheckedWeights(decoder, weights, findings, placement, forward.variant)


def verify_packed(model: Any, decoder: Decoder, kernels: KernelOptions) -> tuple[NativeForward, SelfCheckResult]:
    """Returns the kernels' forward of ``decoder``, after comparing its logits with those of ``model``.

    ``gguf_packed`` has loaded the model.

    Raises NotPacked, or LoadFailed as ``NativeForward`` does.
    """

    def make() -> NativeForward:
        forward = NativeForward(decoder, kernels)
        trim_heap()  # packing frees 13 MB
        return forward

    # transformers computes in float32, so the difference is the rounding of activations to int8.
    check = SameLogits[NativeForward](ExpectedLogits(model, torch.int8))
    verdict = accepted("the logits of our kernels", make, check)
    if verdict.candidate is None:
        raise NotPacked(verdict.reason)
    return verdict.candidate, check.result()


def _cache_groups(model: Any) -> object:
    layout = CacheLayout(model.config)
    return layout.spec(CPU_PAGE_SIZE), layout.has_states
