"""Reads the pipeline stages of a model off its device map, after accelerate has laid it out over several devices.

Knows no family by name and runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import transformers
from torch import nn

from mlserver_torch_stream.engine.devices import computing_device, execution_device
from mlserver_torch_stream.engine.process_resources import FairLock


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """The modules that one device computes. They need not follow each other: a tied head is with the embedding.

    ``finish`` returns when the device has completed this thread's work.
    """

    name: str
    device: torch.device
    modules: tuple[nn.Module, ...]
    finish: Callable[[], None]
    lock: FairLock = field(default_factory=FairLock)


def read_stages(model: transformers.PreTrainedModel) -> tuple[Stage, ...]:
    """Returns the stages in the order of the map; at most one if one device computes everything."""
    found: dict[str, list[nn.Module]] = {}
    for name, place in (getattr(model, "hf_device_map", None) or {}).items():
        try:
            module = model.get_submodule(name)
        except AttributeError:  # a parameter by itself belongs to the stage of the module around it
            continue
        found.setdefault(computing_device(module, place), []).extend(_called(module))
    devices = {name: _device(modules) for name, modules in found.items()}
    return tuple(
        Stage(name, devices[name], tuple(modules), partial(_synchronise, devices[name]))
        for name, modules in found.items()
    )


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the module, or the children of a container, whose ``forward`` is never called."""
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
