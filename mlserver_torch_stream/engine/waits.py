"""Operations that wait for their device, as Python has to know their result before it goes on.

Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
}


class _Waits(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.count: int = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        self.count += is_wait(operation, args, result)
        return result


def is_wait(operation: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Of one operation, as a ``TorchDispatchMode`` sees it."""
    return operation in _WAITING or _selects_by_mask(operation, args) or _leaves_device(args, result)


def _selects_by_mask(operation: Any, args: tuple[Any, ...]) -> bool:
    return operation is _aten.index.Tensor and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


def _leaves_device(args: tuple[Any, ...], result: Any) -> bool:
    def types(values: Any) -> set[str]:
        return {value.device.type for value in tree_leaves(values) if isinstance(value, torch.Tensor)}

    return "cpu" in types(result) and bool(types(args) - {"cpu"})


def count_waits(forward: Callable[[], object]) -> int:
    """Of one call, on this thread. Not in inference mode, where operations that are made of others are one."""
    waits = _Waits()
    with waits:
        forward()
    return waits.count
