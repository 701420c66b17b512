"""Describes a decoder as JSON and a few small tensors, without the weights in files, and builds decoders from plans.

In a plan, weights are references to parts of the files' tensors. Values that no file contains unchanged, such as the
factors of norms, are in the plan itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from operator import itemgetter
from typing import Any

from torch import Tensor

from mlserver_torch_stream.engine.failures import UnsupportedLayout
from mlserver_torch_stream.engine.native.packed_rows import PackedRows
from mlserver_torch_stream.engine.native.rotary import LayerRotary, RotaryAngles, angles_of
from mlserver_torch_stream.engine.native.structure import Decoder, DecoderLayer, DecoderNumbers, Projection

_MAX_OWN = 1 << 26  # bytes of the tensors that no file holds
_PROJECTIONS = ("qkv", "out", "gate_up", "down")


@dataclass(slots=True)
class DecoderPlan:
    """A decoder without the weights in its files. ``structure`` can be written as JSON.

    ``own`` are the tensors that no file contains. ``used`` are the names of the files' tensors to which ``structure``
    refers.
    """

    structure: dict[str, Any]
    own: dict[str, Tensor] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)


def plan_decoder(decoder: Decoder, tensors: Mapping[str, Tensor]) -> DecoderPlan:
    """Returns the plan of a decoder whose weights are rows of the files' ``tensors``.

    Raises UnsupportedLayout if the rotary module does more than ``RotaryAngles``, or if the decoder has other weights.
    """
    plan = DecoderPlan({})
    places = sorted((tensor.data_ptr(), name) for name, tensor in tensors.items() if tensor.numel())
    write = _PlanWriter(tensors, places, plan)
    ropes = angles_of(decoder.rotary)
    plan.structure = {
        "layers": [
            {
                **{name: write.projection(getattr(layer, name)) for name in _PROJECTIONS},
                "norms": {role: write.part(factors) for role, factors in layer.norms.items()},
                "rope": layer.rope,
                "router": None if layer.router is None else write.projection(layer.router),
                "sinks": None if layer.sinks is None else write.part(layer.sinks),
            }
            for layer in decoder.layers
        ],
        "embedding": write.part(decoder.embedding),
        "head": write.projection(decoder.head),
        "last_norm": write.part(decoder.last_norm),
        "ropes": [{"frequencies": write.part(rope.frequencies), "scale": rope.scale} for rope in ropes],
        "whole_qk_norm": decoder.whole_qk_norm,
        "activation": decoder.activation,
        "numbers": asdict(decoder.numbers),
    }
    if sum(tensor.nbytes for tensor in plan.own.values()) > _MAX_OWN:
        raise UnsupportedLayout("the model has weights that are not in its files")
    return plan


def build_decoder(structure: Mapping[str, Any], own: Mapping[str, Tensor], tensor: Callable[[str], Tensor]) -> Decoder:
    """Builds a decoder from its plan. ``tensor`` returns a tensor of the files by name.

    Raises KeyError or TypeError for an invalid plan.
    """

    @cache  # tied weights stay one object
    def part(name: str | None, first: int | str, kind: str | None, heads: int, *layout: int) -> Tensor | PackedRows:
        shape, strides = layout[: len(layout) // 2], layout[len(layout) // 2 :]
        data = own[str(first)] if name is None else tensor(name).flatten()[int(first) :].as_strided(shape, strides)
        return data if kind is None else PackedRows(kind, data, heads)

    def projection(parts: Mapping[str, Any]) -> Projection:
        biases = (None if bias is None else part(*bias) for bias in parts["biases"])
        return Projection(tuple(part(*weight) for weight in parts["weights"]), tuple(biases), parts["experts"])

    layers = (
        DecoderLayer(
            **{name: projection(layer[name]) for name in _PROJECTIONS},
            norms={role: part(*factors) for role, factors in layer["norms"].items()},
            rope=layer["rope"],
            router=None if layer["router"] is None else projection(layer["router"]),
            sinks=None if layer["sinks"] is None else part(*layer["sinks"]),
        )
        for layer in structure["layers"]
    )
    ropes = [RotaryAngles(part(*rope["frequencies"]), rope["scale"]) for rope in structure["ropes"]]
    return Decoder(
        layers=tuple(layers),
        embedding=part(*structure["embedding"]),
        head=projection(structure["head"]),
        last_norm=part(*structure["last_norm"]),
        rotary=ropes[0] if len(ropes) == 1 else LayerRotary(tuple(ropes)),
        whole_qk_norm=structure["whole_qk_norm"],
        activation=structure["activation"],
        numbers=DecoderNumbers(**{each.name: structure["numbers"][each.name] for each in fields(DecoderNumbers)}),
    )


@dataclass(slots=True)
class _PlanWriter:
    tensors: Mapping[str, Tensor]
    places: Sequence[tuple[int, str]]  # the addresses and names of the tensors, in the order of the addresses
    plan: DecoderPlan

    def projection(self, projection: Projection) -> dict[str, Any]:
        biases = [None if bias is None else self.part(bias) for bias in projection.biases]
        weights = [self.part(weight) for weight in projection.weights]
        return {"weights": weights, "biases": biases, "experts": projection.experts}

    def part(self, of: Tensor | PackedRows) -> list[Any]:
        """Returns a tensor's name, first element, block format and ``heads``, and then the part's shape and strides.

        The name is None if no file has the tensor; then there are neither shape nor strides.
        """
        data, kind, heads = (of.data, of.kind, of.heads) if isinstance(of, PackedRows) else (of, None, 0)
        after = bisect_right(self.places, data.data_ptr(), key=itemgetter(0))
        if after and (whole := self.tensors[name := self.places[after - 1][1]]).is_contiguous():
            first, rest = divmod(data.data_ptr() - whole.data_ptr(), whole.itemsize)
            last = first + sum((count - 1) * stride for count, stride in zip(data.shape, data.stride(), strict=True))
            if data.dtype == whole.dtype and rest == 0 and last < whole.numel():
                self.plan.used.add(name)
                return [name, first, kind, heads, *data.shape, *data.stride()]
        key = str(len(self.plan.own))
        self.plan.own[key] = data.detach().clone().contiguous()
        return [None, key, kind, heads]
