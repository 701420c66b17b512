"""Checks that our kernels reproduce the logits of transformers' model.

The logits are compared over as few layers as have every kind of layer. The weights of all layers are compared while
they are packed, and then all layers compute a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.checks.forward_choice import release_weights
from mlserver_torch_stream.engine.checks.harness import accepted
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.record import (
    NotRecordable,
    ProvedLoad,
    mapped_tensors,
    outline_of,
    recorded_decoder,
)
from mlserver_torch_stream.engine.checks.selfcheck import SameLogits, SelfCheckResult
from mlserver_torch_stream.engine.config_fields import settle_positions
from mlserver_torch_stream.engine.failures import NotPacked, Unsuitable, UnsupportedLayout
from mlserver_torch_stream.engine.loading.gguf_packed import load_packed
from mlserver_torch_stream.engine.loading.loader import LoadedWeights, describe
from mlserver_torch_stream.engine.loading.placement import read_placement
from mlserver_torch_stream.engine.machine import trim_heap
from mlserver_torch_stream.engine.native.decoder_plan import build_decoder, plan_decoder
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.packed_rows import PackedLinear, unpack
from mlserver_torch_stream.engine.native.panels_file import PanelsFile
from mlserver_torch_stream.engine.native.quantise import Rounding, round_weights
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
    setting; the panels are kept in ``file``. Raises Unsuitable or LoadFailed.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
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
    weights = LoadedWeights(outline, model.generation_config, vocab_size, description)
    # transformers computes in float32, so the difference is the rounding of activations to int8.
    forward, findings = _check(ExpectedLogits(model, torch.int8), decoder, kernels, file=file)
    return forward, ProvedLoad(plan, weights, findings, placement, None)


def check_dense(
    model: Any, planned: ProvedLoad, files: Iterable[Path], kernels: KernelOptions, rounding: Rounding | None
) -> tuple[NativeForward, ProvedLoad]:
    """Checks our kernels with the dense weights in ``files``, rounded to ``rounding`` if given.

    ``planned`` has the plan of transformers' ``model``. The weights of ``model`` are freed, also if an error is raised,
    because the kernels' weights should not be in memory beside them. Any error but LoadFailed refuses the kernels.
    """
    try:
        decoder = recorded_decoder(planned, mapped_tensors(files))
        expected = ExpectedLogits(model, None if rounding is None else torch.int8)  # so activations are rounded
        forward, findings = _check(expected, decoder, kernels, rounding)
    finally:
        release_weights(model)
    return forward, replace(planned, findings=findings)


def _check(
    expected: ExpectedLogits,
    decoder: Decoder,
    kernels: KernelOptions,
    rounding: Rounding | None = None,
    file: PanelsFile | None = None,
) -> tuple[NativeForward, SelfCheckResult]:
    """Compares logits over the first layers, and makes the forward of all layers. Takes the expected model apart."""
    model, layout = expected.model, CacheLayout(expected.model.config)
    depth = _proving_depth(model, decoder, layout)
    if depth == len(decoder.layers):
        return verify_kernels(expected, decoder, kernels, rounding, file)
    size = sum(module.rows.data.nbytes for module in model.modules() if isinstance(module, PackedLinear))
    _shorten(model, depth)
    unpack(model, size)  # the panels of all layers, which are made later, take as much memory
    findings = verify_kernels(expected, replace(decoder, layers=decoder.layers[:depth]), kernels, rounding)[1]
    release_weights(model)
    trim_heap()
    forward = NativeForward(decoder, kernels, rounding, file=file)
    groups = len(layout.spec(1).groups)
    cache = PagedCache(layout, findings.page_size, [1] * groups, 0)
    if not forward(Batch((BatchSequence([0], 0, ([0],) * groups),)), cache).is_finite(0):
        raise Unsuitable("the logits of our kernels over all layers are not finite")
    return forward, replace(findings, specs=cache.specs)


def _proving_depth(model: Any, decoder: Decoder, layout: CacheLayout) -> int:
    """Returns how many of the first layers are needed to include every kind of layer; at least two.

    Layers of the same kind differ only in their weights, which are compared for all layers while they are packed.
    """
    kinds = [
        (
            *(_kind(getattr(layer, name)) for name in ("qkv", "out", "gate_up", "down")),
            tuple(sorted(layer.norms)),
            layer.rope,
            window,
            _plain_values(module),
        )
        for layer, window, module in zip(decoder.layers, layout.windows, model.model.layers, strict=True)
    ]
    return min(len(kinds), max(_LEAST_LAYERS, *(1 + kinds.index(kind) for kind in kinds)))


def _kind(projection: Projection) -> object:
    parts = zip(projection.weights, projection.biases, strict=True)
    return [(getattr(weight, "kind", None), weight.shape, bias is None) for weight, bias in parts]


def _plain_values(layer: nn.Module) -> object:
    """Returns the classes of a layer's modules and the values on which their code can depend, except its number."""
    return [
        (
            type(module),
            {
                name: value
                for name, value in vars(module).items()
                if isinstance(value, int | float | str | None) and name != "layer_idx"
            },
        )
        for module in layer.modules()
    ]


def _shorten(model: Any, depth: int) -> None:
    """Removes all layers of a model except the first ``depth`` layers."""
    values, layers = vars(model.config), model.config.num_hidden_layers
    values |= {key: value[:depth] for key, value in values.items() if isinstance(value, list) and len(value) == layers}
    values["num_hidden_layers"] = depth
    model.model.layers = model.model.layers[:depth]


def verify_kernels(
    expected: ExpectedLogits,
    decoder: Decoder,
    kernels: KernelOptions,
    rounding: Rounding | None = None,
    file: PanelsFile | None = None,
) -> tuple[NativeForward, SelfCheckResult]:
    """Makes a forward with our kernels for ``decoder``, and compares its logits with ``expected``.

    Returns the forward, and what the comparison found. With ``rounding`` transformers' model is rounded as well. Raises
    Unsuitable if the logits differ, and LoadFailed as ``NativeForward`` does.
    """

    def make() -> NativeForward:
        forward = NativeForward(decoder, kernels, rounding, file=file)
        if rounding is not None:  # with the same rounding in transformers' forward the check can be strict
            round_weights(read_decoder(expected.model), rounding)
        trim_heap()  # packing frees 13 MB
        return forward

    check = SameLogits[NativeForward](expected)
    verdict = accepted(f"the logits of our kernels over {len(decoder.layers)} layers", make, check)
    if verdict.candidate is None:
        raise Unsuitable(verdict.reason)
    return verdict.candidate, check.result()
