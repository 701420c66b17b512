"""Detects operations whose result Python has to know before it can continue."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mlserver_torch_stream.engine.checks.overlap import count_waits, is_wait

Mode = Callable[[], AbstractContextManager[None]]


@pytest.mark.parametrize(
    ("operation", "waits"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: 1 if (x > 0).any() else 0, 1),
        (lambda x: x[x > 0], 1),
        (lambda x: torch.where(x > 0), 1),
        (lambda x: torch.repeat_interleave(x, x.long()), 1),
        (lambda x: torch.bincount(x.long()), 1),
        (lambda x: x[torch.tensor([1, 0])] + torch.where(x > 0, x, -x)[:2], 0),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_python_has_to_know_is_a_wait(operation: Callable[[torch.Tensor], Any], waits: int, mode: Mode) -> None:
    with mode():
        assert count_waits(lambda: operation(torch.ones(3))) == waits


@torch.library.custom_op("mlserver_torch_stream_tests::peek", mutates_args=())
def peek(x: torch.Tensor) -> torch.Tensor:
    """Reads a value from the device, as bitsandbytes does when it looks for outliers."""
    return x * 2 if (x > 0).any() else x.clone()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_waits_inside_of_operations_that_are_written_in_python(
    mode: Mode,
) -> None:
    with mode():
        assert count_waits(lambda: peek(torch.ones(3))) == 1


@pytest.mark.parametrize(
    ("dtype", "generation", "waits"),
    [(torch.bfloat16, 8, True), (torch.bfloat16, 9, False), (torch.bfloat16, 12, True), (torch.float16, 9, True)],
)
def test_products_of_experts_wait_where_no_kernel_is_for_them(
    dtype: torch.dtype, generation: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 0))
    with FakeTensorMode():
        rows = torch.empty(4, 16, dtype=dtype, device="cuda")
    assert is_wait(torch.ops.aten._grouped_mm.default, (rows,), rows) == waits
    assert not is_wait(torch.ops.aten._grouped_mm.default, (torch.empty(4, 16, dtype=dtype),), torch.empty(4))
