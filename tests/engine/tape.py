"""A recorder for the CPU with the meaning of a CUDA graph: the same operations on the same memory, without Python.

What a CUDA graph cannot hold, an operation whose result Python has to know, breaks a recording here too. Collectives
between processes are operations like any other, as those of NCCL are in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mlserver_torch_stream.engine.devices import is_split, is_wait


class _Part(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_split(types):
            return NotImplemented
        result = operation(*args, **(kwargs or {}))
        if is_wait(operation, args, result):
            raise RuntimeError(f"{operation} cannot be recorded")
        if operation.name() != "_c10d_functional::_wrap_tensor_autograd":  # no memory of its own
            self.operations.append((operation, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for operation, args, kwargs, result in self.operations:
            given = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
            again = operation(*args, **kwargs)
            _wait(operation, again)
            for old, new in zip(_tensors(result), _tensors(again), strict=True):
                if old.untyped_storage().data_ptr() not in given:
                    old.copy_(new)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _wait(operation: Any, result: Any) -> None:
    """Waits until a collective is done."""
    if operation.namespace == "c10d":
        for work in tree_leaves(result):
            if isinstance(work, torch.ScriptObject):
                work.wait()
    elif operation.namespace == "_c10d_functional":
        for each in _tensors(result):
            torch.ops._c10d_functional.wait_tensor(each)


class TapeRecorder:
    """``parts``: how many have been recorded."""

    def __init__(self) -> None:
        self.parts = 0
        self.replays = 0
        self._part: _Part | None = None

    def begin(self, device: torch.device, pool: object = None) -> None:
        self._part = _Part()
        self._part.__enter__()

    def end(self) -> Callable[[], None]:
        part, self._part = self._part, None
        assert part is not None
        part.__exit__(None, None, None)
        self.parts += 1

        def replay() -> None:
            self.replays += 1
            part.replay()

        return replay

    @contextmanager
    def recording(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._part is not None:
                self.end()
