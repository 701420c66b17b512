"""Loads packed weights into transformers' model, and checks that our kernels reproduce its logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.checks.harness import accepted
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.record import NotRecordable, ProvedLoad, outline_of
from mlserver_torch_stream.engine.checks.selfcheck import SameLogits, SelfCheckResult
from mlserver_torch_stream.engine.config_fields import settle_positions
from mlserver_torch_stream.engine.failures import NotPacked, UnsupportedLayout
from mlserver_torch_stream.engine.loading.gguf_packed import load_packed
from mlserver_torch_stream.engine.loading.loader import LoadedWeights, describe
from mlserver_torch_stream.engine.loading.placement import read_placement
from mlserver_torch_stream.engine.machine import trim_heap
from mlserver_torch_stream.engine.native.decoder_plan import build_decoder, plan_decoder
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.panels_file import PanelsFile
from mlserver_torch_stream.engine.native.structure import Decoder, Projection, read_decoder

_LEAST_LAYERS = 2  # so that a layer reads what a layer before it has written


def check_packed(
    folder: Path,
    gguf_file: Path,
    name: str,
    kernels: KernelOptions,
    max_model_len: int | None = None,
    file: PanelsFile | None = None,
) -> tuple[NativeForward, ProvedLoad]:
    """Loads and checks packed weights.

    ``folder`` was written by ``gguf_packed`` from ``gguf_file``; ``name`` is the model's name; ``max_model_len`` is the
    setting; the panels are kept in ``file``. Raises NotPacked or LoadFailed.
    """
    config = AutoConfig.from_pretrained(folder)
    settle_positions(config, max_model_len)
    packed = load_packed(folder, gguf_file, config)
    model, placement = packed.model, read_placement(packed.model)
    description, vocab_size = describe(name, model, packed.description), len(model.get_input_embeddings().weight)
    try:
        plan = plan_decoder(read_decoder(model), packed.tensors)
        outline = outline_of(model)
    except (UnsupportedLayout, NotRecordable) as error:
        raise NotPacked(str(error)) from None
    # The check runs the decoder that a later start runs: built from the plan and the file.
    decoder = build_decoder(plan.structure, plan.own, packed.tensors.__getitem__)
    generation_config, layout = model.generation_config, CacheLayout(model.config)
    depth = _proving_depth(decoder, layout)
    if depth == len(decoder.layers):
        forward, findings = verify_packed(model, decoder, kernels, file)
    else:
        _shorten(model, depth)
        findings = verify_packed(model, replace(decoder, layers=decoder.layers[:depth]), kernels)[1]
        forward = NativeForward(decoder, kernels, file=file)
        forward.reserve(cache := PagedCache(layout, findings.page_size, [1] * len(layout.spec(1).groups), 0))
        findings = replace(findings, specs=cache.specs)
    weights = LoadedWeights(outline, generation_config, vocab_size, description)
    return forward, ProvedLoad(plan, weights, findings, placement, None)


def _proving_depth(decoder: Decoder, layout: CacheLayout) -> int:
    """Returns how many of the first layers are needed to include every kind of layer; at least two.

    Layers of the same kind differ only in their weights, which are compared for all layers while they are packed.
    """
    kinds = [
        (
            *(_kind(getattr(layer, name)) for name in ("qkv", "out", "gate_up", "down")),
            tuple(sorted(layer.norms)),
            layer.rope,
            window,
        )
        for layer, window in zip(decoder.layers, layout.windows, strict=True)
    ]
    return min(len(kinds), max(_LEAST_LAYERS, *(1 + kinds.index(kind) for kind in kinds)))


def _kind(projection: Projection) -> object:
    parts = zip(projection.weights, projection.biases, strict=True)
    return [(getattr(weight, "kind", None), weight.shape, bias is None) for weight, bias in parts]


def _shorten(model: Any, depth: int) -> None:
    """Removes all layers of a model except the first ``depth`` layers."""
    values, layers = vars(model.config), model.config.num_hidden_layers
    values |= {key: value[:depth] for key, value in values.items() if isinstance(value, list) and len(value) == layers}
    values["num_hidden_layers"] = depth
    model.model.layers = model.model.layers[:depth]


def verify_packed(
    model: Any, decoder: Decoder, kernels: KernelOptions, file: PanelsFile | None = None
) -> tuple[NativeForward, SelfCheckResult]:
    """Makes a forward with our kernels for ``decoder``, and compares its logits with the logits of ``model``.

    Returns the forward, and what the comparison found. ``model`` is the same model in transformers, as ``gguf_packed``
    loads it. Raises NotPacked if the logits differ, and LoadFailed as ``NativeForward`` does.
    """

    def make() -> NativeForward:
        forward = NativeForward(decoder, kernels, file=file)
        trim_heap()  # packing frees 13 MB
        return forward

    # transformers computes in float32, so the difference is the rounding of activations to int8.
    check = SameLogits[NativeForward](ExpectedLogits(model, torch.int8))
    verdict = accepted(f"the logits of our kernels over {len(decoder.layers)} layers", make, check)
    if verdict.candidate is None:
        raise NotPacked(verdict.reason)
    return verdict.candidate, check.result()
