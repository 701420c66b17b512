"""Checks GPUs, copies tensors to and from devices, and finds out on which device a module runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import transformers
from torch import nn


def check_devices(devices: Iterable[torch.device]) -> None:
    """Raises a device's error if the device is lost: after an illegal memory access every CUDA call returns that error.

    The check allocates nothing, because a device without free memory is not lost.
    """
    for device in devices:
        if device.type == "cuda":  # only this stream, because other models compute on the device
            torch.cuda.current_stream(device).synchronize()
        elif device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)


def free_memory(device: torch.device) -> int:
    """Returns the free bytes of a GPU.

    First frees the blocks that torch's allocator has kept since the checks at load.
    """
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def from_host(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor of these numbers, which may be nested. Does not wait for the device's queued work.

    The copy goes through pinned memory, which torch reuses only after the copy has completed.
    """
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a host tensor to a device, as ``from_host`` does. Returns the tensor itself if it is already there."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(*tensors: torch.Tensor) -> list[list[Any]]:
    """Returns the values of several tensors on one device as lists, and waits for the device only once."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    if tensors[0].device.type == "cuda":
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return [copy.tolist() for copy in copies]


def device_name(place: str | int | torch.device) -> str:
    """Returns the name of the device that a device map's value stands for."""
    return f"cuda:{place}" if isinstance(place, int) else str(place)


def execution_device(module: nn.Module) -> str | int | torch.device | None:
    """Returns the device on which accelerate's hooks run the module; None without hooks."""
    for inner in module.modules():
        hook = getattr(inner, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):
            if (place := getattr(part, "execution_device", None)) is not None:
                result: str | int | torch.device = place
                return result
    return None


def computing_device(module: nn.Module, place: str | int | torch.device) -> str:
    """Returns the name of the device that computes a module, if a device map puts the module at ``place``.

    Hooks move offloaded weights to a GPU if there is one, otherwise to the CPU.
    """
    device = execution_device(module) if str(place) in ("cpu", "disk") else None
    return device_name(place if device is None else device)


def input_device(model: transformers.PreTrainedModel) -> torch.device:
    """Returns the device on which a model expects token ids.

    For an offloaded embedding, only a hook knows this device.
    """
    return weight_device(model.get_input_embeddings(), torch.device("cpu"))


def weight_device(module: nn.Module | None, otherwise: torch.device) -> torch.device:
    """Returns the device that uses a module's weight, or ``otherwise`` without a weight or a known device."""
    weight = getattr(module, "weight", None)
    if module is None or not isinstance(weight, torch.Tensor):
        return otherwise
    if weight.device.type != "meta":
        return weight.device
    place = execution_device(module)
    return otherwise if place is None else torch.device(device_name(place))


def device_types(model: transformers.PreTrainedModel) -> set[str]:
    """Returns the types of the devices that have a model's weights, and of the device that receives its token ids."""
    return {input_device(model).type, *(parameter.device.type for parameter in model.parameters())}


def plain_forward(model: transformers.PreTrainedModel) -> Callable[..., Any]:
    """Returns the model without accelerate's outermost hook, which copies the output to the device of the input.

    Such a copy between GPUs waits for all work that is queued on either GPU, including the work of other batches.
    """
    hook = getattr(model, "_hf_hook", None)
    fetches = any(getattr(part, "offload", False) for part in getattr(hook, "hooks", (hook,)))
    forward: Callable[..., Any] = model if hook is None or fetches else model._old_forward
    return forward
