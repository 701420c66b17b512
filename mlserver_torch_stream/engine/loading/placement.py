"""Reads which layers and how many bytes each device has, and checks the modules that a device map names.

If a device map names modules that the model does not have, transformers only warns, and places the model's modules
elsewhere. Here, such a map is refused.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.did_you_mean import did_you_mean
from mlserver_torch_stream.engine.cache.page_counts import CacheSize
from mlserver_torch_stream.engine.cache.pages import CacheSpec
from mlserver_torch_stream.engine.config_fields import read_config
from mlserver_torch_stream.engine.devices import computing_device, device_name, input_device
from mlserver_torch_stream.errors import LoadFailed

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The weights at one place of the device map.

    If another device computes with these weights, ``brought_to`` names that device.
    """

    place: str
    layers: tuple[int, ...]
    rest: tuple[str, ...]  # modules outside of the layers
    weights: int  # bytes
    brought_to: str | None = None

    def __str__(self) -> str:
        parts = [f"layers {_ranges(self.layers)}"] if self.layers else []
        return f"{self.place}: {', '.join([*parts, *self.rest])} ({format_bytes(self.weights)})"


def check_tied(model: transformers.PreTrainedModel) -> None:
    """Raises LoadFailed if only one of two tied weights is on disk: accelerate would not find that weight there."""
    for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if (model.get_parameter(name).device.type == "meta") != (model.get_parameter(source).device.type == "meta"):
            raise LoadFailed(f"{name} and {source} are the same tensor, so either both or neither must be on disk")


def read_placement(model: transformers.PreTrainedModel) -> tuple[DeviceShare, ...]:
    """Returns the share of each place in the device map, in the map's order."""
    device_map = getattr(model, "hf_device_map", None) or {"": model.device}
    entries: dict[tuple[str, str | None], list[str]] = {}
    for name, place in device_map.items():
        entries.setdefault((device_name(place), _brought_to(model, name, place)), []).append(name)
    seen: set[int] = set()
    return tuple(_held(model, place, names, brought_to, seen) for (place, brought_to), names in entries.items())


def _brought_to(model: transformers.PreTrainedModel, name: str, place: Any) -> str | None:
    """Returns the device that computes with the weights at a place; None if the weights are on that device."""
    module = _module(model, name)
    device = None if module is None else computing_device(module, place)
    return None if device == device_name(place) else device


def _held(
    model: transformers.PreTrainedModel, place: str, names: list[str], brought_to: str | None, seen: set[int]
) -> DeviceShare:
    layers: set[int] = set()
    rest: list[str] = []
    weights = 0
    for name in names:
        module = _module(model, name)
        tensors = [_tensor(model, name)] if module is None else [*module.parameters(), *module.buffers()]
        # Tied weights are one tensor, which counts only at its first place.
        weights += sum(bytes_of(tensor) for tensor in tensors if id(tensor) not in seen)
        seen.update(map(id, tensors))
        paths = [name] if module is None else [path for path, _ in module.named_modules(prefix=name)]
        numbers = {int(match[1]) for path in paths if (match := _LAYER.search(path))}
        layers |= numbers
        if name == "" or not numbers:
            rest.append(name.rpartition(".")[2] or "everything else")
    return DeviceShare(place, tuple(sorted(layers)), tuple(rest), weights, brought_to)


def _module(model: nn.Module, name: str) -> nn.Module | None:
    """Returns a module by name; None if the name is that of a parameter, which a map can place separately."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    owner, _, own = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(owner), own)
    return tensor


def bytes_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor on this rank.

    A quantised tensor consists of several parts. If a tensor is split over ranks, only the part of this rank counts.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        return sum(bytes_of(part) for part in parts if isinstance(part, torch.Tensor))
    count: int = tensor.numel() * tensor.element_size()
    return count


def moved_bytes(placement: Sequence[DeviceShare]) -> int:
    """Returns the bytes of the weights that each step copies to a device."""
    return sum(held.weights for held in placement if held.brought_to is not None)


def seconds_per_step(model: transformers.PreTrainedModel) -> float:
    """Returns the seconds of a forward of one token, including all copies of weights, in the faster of two runs."""
    token = torch.zeros((1, 1), dtype=torch.long, device=input_device(model))
    times = []
    for _ in range(2):
        began = time.monotonic()
        model(token).logits.tolist()
        times.append(time.monotonic() - began)
    return min(times)


def describe_moves(placement: Sequence[DeviceShare], seconds: float) -> str:
    """Describes the speed of a model whose weights are copied to a device in each step."""
    moved = moved_bytes(placement)
    ways = dict.fromkeys(f"{held.place} to {held.brought_to}" for held in placement if held.brought_to)
    return (
        f"{format_bytes(moved)} of weights are moved from {', '.join(ways)} at every step, for any batch size: "
        f"measured now, a step of one token takes {seconds:.3g} s ({format_bytes(int(moved / seconds))}/s), "
        f"so an answer gets at most {1 / seconds:.3g} tokens/s"
    )


def describe_placement(
    placement: Sequence[DeviceShare], specs: Mapping[torch.device, CacheSpec], size: CacheSize
) -> str:
    """Describes each place of the weights, each device's part of the KV cache, and the bytes of a token there."""
    caches = [
        f"{device}: {format_bytes(size.bytes_of(spec))}, {format_bytes(spec.token_bytes)} a token"
        + (f" and {format_bytes(spec.state_bytes)} a sequence" if spec.state_bytes else "")
        for device, spec in specs.items()
    ]
    return f"{'; '.join(map(str, placement))}; KV cache on {'; '.join(caches)}"


def no_room(
    placement: Sequence[DeviceShare],
    specs: Mapping[torch.device, CacheSpec],
    asked: int | None,
    free: Mapping[torch.device, int],
) -> str:
    """Returns why the KV cache has no room for one page of a sequence, with the bytes of each device.

    ``asked`` is the size of the cache in the settings; None means that the cache may take all ``free`` bytes.
    """
    needs = [
        f"on {device} the first page of a sequence takes {format_bytes(spec.sequence_bytes(1))} "
        f"and {format_bytes(free[device])} are free"
        for device, spec in specs.items()
    ]
    beside = f", beside the weights: {'; '.join(map(str, placement))}" if placement else ""
    cache = "the free memory" if asked is None else f"a KV cache of {format_bytes(asked)}"
    return f"{cache} is too small for one sequence of this model: {'; '.join(needs)}{beside}"


def _ranges(numbers: Sequence[int]) -> str:
    """Returns the numbers as ranges, such as ``0-3, 7``."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def check_device_map(device_map: Any, place: str, gguf_file: Path | None, **options: Any) -> None:
    """Raises LoadFailed for the first key of a device map that does not name a module of the model.

    ``place`` is the folder or hub id of the model. ``options`` are arguments of ``AutoConfig.from_pretrained``.
    """
    if not isinstance(device_map, Mapping) or set(device_map) == {""}:
        return
    config = read_config(place, place, gguf_file, **options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, trust_remote_code=options.get("trust_remote_code", False)
        )
    known = [name for name, _ in model.named_modules()]
    known += [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    for name in device_map:
        if name not in known:
            tops = [path for path in known if path and "." not in path]
            hint = did_you_mean(str(name), known) or f"; its top-level modules are {', '.join(tops)}"
            raise LoadFailed(f"parameters.extra.device_map: the model has no module {name!r}{hint}")
