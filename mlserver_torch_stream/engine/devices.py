"""Handles devices with memory of their own: health, copies, placement, and operations that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def check_devices(devices: Iterable[torch.device]) -> None:
    """Raises the device's own error if one is lost: after an illegal access CUDA returns that error from every call.

    Allocates nothing, as a full device is not lost.
    """
    for device in devices:
        if device.type == "cuda":  # not the whole device: that would break CUDA graph captures of other models
            torch.cuda.current_stream(device).synchronize()
        elif device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)


def from_host(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor of these numbers, however nested. Does not wait for the device's queued work.

    The copy goes through pinned memory, which torch reuses only after the copy.
    """
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor of the host on a device, as ``from_host`` does; itself where it is there already."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(*tensors: torch.Tensor) -> list[list[Any]]:
    """Returns the numbers of tensors of one device, which is waited for once."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    if tensors[0].device.type == "cuda":
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return [copy.tolist() for copy in copies]


def device_name(place: str | int | torch.device) -> str:
    """Returns the name of a device map's value."""
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
    """Returns the name of the device that computes a module which a device map puts at ``place``.

    Hooks move offloaded weights to a GPU, or to the CPU if there is none.
    """
    device = execution_device(module) if str(place) in ("cpu", "disk") else None
    return device_name(place if device is None else device)


def input_device(model: transformers.PreTrainedModel) -> torch.device:
    """Returns the device of a model's token ids. Only the hook of an offloaded embedding knows it."""
    return weight_device(model.get_input_embeddings(), torch.device("cpu"))


def weight_device(module: nn.Module | None, otherwise: torch.device) -> torch.device:
    """Returns the device on which a module's weight is used; ``otherwise`` if it has none, or is not known."""
    weight = getattr(module, "weight", None)
    if module is None or not isinstance(weight, torch.Tensor):
        return otherwise
    if weight.device.type != "meta":
        return weight.device
    place = execution_device(module)
    return otherwise if place is None else torch.device(device_name(place))


def device_types(model: transformers.PreTrainedModel) -> set[str]:
    """Returns the types of the devices that hold a model's weights or take its token ids."""
    return {input_device(model).type, *(parameter.device.type for parameter in model.parameters())}


def plain_forward(model: transformers.PreTrainedModel) -> Callable[..., Any]:
    """Returns the model without accelerate's outermost hook, which copies the output to the device of the input.

    Between GPUs that copy waits for all work that is queued on either of them, also for that of other batches.
    """
    hook = getattr(model, "_hf_hook", None)
    fetches = any(getattr(part, "offload", False) for part in getattr(hook, "hooks", (hook,)))
    forward: Callable[..., Any] = model if hook is None or fetches else model._old_forward
    return forward


_aten = torch.ops.aten
_WAITING = {
    _aten.item.default,
    _aten._local_scalar_dense.default,
    _aten.is_nonzero.default,
    _aten.nonzero.default,
    _aten.equal.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.repeat_interleave.Tensor,
    _aten.bincount.default,
    _aten.allclose.default,
}
_COPIES = {_aten._to_copy.default, _aten.copy_.default}


class DeviceSyncs(Exception):
    """An operation waits for its device in a place where none may."""


Saw = Callable[[Any, tuple[Any, ...], Any], None]
"""Gets an operation, its arguments and its result."""


class _Operations(TorchDispatchMode):  # type: ignore[misc]
    """Sees the basic operations of composite ones, also in inference mode, where torch passes them on whole."""

    def __init__(self, saw: Saw) -> None:
        super().__init__()
        self._saw = saw

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_split(types):
            return NotImplemented
        kwargs = kwargs or {}
        parts = None if types else _parts(operation, args)  # tensors of other types have code of their own
        if parts is not None:
            with self:
                return parts(*args, **kwargs)
        result = operation(*args, **kwargs)
        self._saw(operation, args, result)
        return result


def is_split(types: Iterable[type]) -> bool:
    """Whether a ``TorchDispatchMode`` sees an operation on tensors that are split over ranks, or wait for a collective.

    If it returns NotImplemented, it sees the operations on this rank's part, and the collectives.
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    return any(issubclass(each, DTensor | AsyncCollectiveTensor) for each in types)


def _parts(operation: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Returns the implementation of a composite operation: of torch's own, or of a package's in Python."""
    keys = [DispatchKey.CompositeImplicitAutograd]
    if operation.namespace != "aten":
        device = next((each.device.type for each in tree_leaves(args) if isinstance(each, torch.Tensor)), "cpu")
        keys += [getattr(DispatchKey, device.upper(), DispatchKey.Undefined), DispatchKey.CompositeExplicitAutograd]
    for key in keys:
        if torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), key):
            return partial(operation._op_dk, key)
    return None


def no_waits() -> AbstractContextManager[object]:
    """Inside it, on this thread, an operation that no device can replay by itself raises DeviceSyncs.

    Such an operation waits for the device, or copies from the host's memory.
    """
    return _Operations(_refuse)


def _refuse(operation: Any, args: tuple[Any, ...], result: Any) -> None:
    if is_wait(operation, args, result) or _comes_from_host(operation, args, result):
        raise DeviceSyncs(f"{operation} cannot be recorded")


def count_waits(forward: Callable[[], object]) -> int:
    """Counts the waits of one call, on this thread."""
    seen: list[bool] = []
    with _Operations(lambda *operation: seen.append(is_wait(*operation))):
        forward()
    return sum(seen)


def is_wait(operation: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether an operation, as a ``TorchDispatchMode`` sees it, waits for its device."""
    return (
        operation in _WAITING
        or _selects_by_mask(operation, args)
        or _leaves_device(args, result)
        or _waits_inside(operation, args)
    )


def _selects_by_mask(operation: Any, args: tuple[Any, ...]) -> bool:
    return operation is _aten.index.Tensor and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


def _waits_inside(operation: Any, args: tuple[Any, ...]) -> bool:
    """Whether a product of experts waits: the host reads the rows of each, unless torch has a kernel that does."""
    if operation.name() != "aten::_grouped_mm" or not args[0].is_cuda:
        return False
    return args[0].dtype != torch.bfloat16 or torch.cuda.get_device_capability(args[0].device)[0] not in (9, 10)


def _leaves_device(args: tuple[Any, ...], result: Any) -> bool:
    return "cpu" in _places(result) and bool(_places(args) - {"cpu"})


def _comes_from_host(operation: Any, args: tuple[Any, ...], result: Any) -> bool:
    return operation in _COPIES and "cpu" in _places(args) and bool(_places(result) - {"cpu"})


def _places(values: Any) -> set[str]:
    return {value.device.type for value in tree_leaves(values) if isinstance(value, torch.Tensor)}
