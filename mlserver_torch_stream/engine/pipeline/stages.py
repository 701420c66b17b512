"""The stages of a model that accelerate has laid out over several devices, read off its device map.

Knows no family by name and runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.devices import device_name, execution_device
from mlserver_torch_stream.engine.process_resources import FairLock

_OFFLOADED = ("cpu", "disk")


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """The modules that one device computes, not always one after another: a tied head is where the embedding is.

    ``finish`` returns when the device has done what this thread asked of it.
    """

    name: str
    device: torch.device
    modules: tuple[nn.Module, ...]
    finish: Callable[[], None]
    lock: FairLock = field(default_factory=FairLock)


def read_stages(model: PreTrainedModel) -> tuple[Stage, ...]:
    """In the order of the map; at most one where there is nothing to overlap."""
    found: dict[str, list[nn.Module]] = {}
    for name, place in (getattr(model, "hf_device_map", None) or {}).items():
        try:
            module = model.get_submodule(name)
        except AttributeError:  # a parameter by itself: its module is entered with what surrounds it
            continue
        found.setdefault(_computed_on(module, place), []).extend(_called(module))
    devices = {name: _device(modules) for name, modules in found.items()}
    return tuple(
        Stage(name, devices[name], tuple(modules), partial(_synchronise, devices[name]))
        for name, modules in found.items()
    )


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _computed_on(module: nn.Module, place: str | int | torch.device) -> str:
    """Weights that no device has room for are computed where their hook brings them."""
    hook_place = execution_device(module) if str(place) in _OFFLOADED else None
    return device_name(place if hook_place is None else hook_place)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or where it is a mere container, whose ``forward`` nobody calls, what it contains."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for child in module.children():
            yield from _called(child)
    else:
        yield module


def _device(modules: list[nn.Module]) -> torch.device:
    held = (parameter.device for module in modules for parameter in module.parameters())
    device: torch.device | None = next((each for each in held if each.type != "meta"), None)
    if device is not None:
        return device
    return torch.device(next((place for each in modules if (place := execution_device(each)) is not None), "cpu"))
