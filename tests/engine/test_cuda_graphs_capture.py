"""CUDA graphs as a GPU records and replays them, and what a recording that breaks off leaves behind."""

import gc
import threading

import pytest
import torch

from mlserver_torch_stream.engine.cuda_graphs.graph_capture import CudaGraphCapture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def recorded(capture: CudaGraphCapture, given: torch.Tensor) -> list[float]:
    """What two parts that were recorded one after the other compute from values that they were not recorded with."""
    with capture.recording():
        capture.begin(given.device)
        doubled = given * 2
        double = capture.end()
        capture.begin(given.device)
        result = doubled + 1
        add_one = capture.end()
    given.copy_(torch.arange(4.0))
    double()
    add_one()
    torch.cuda.synchronize()
    values: list[float] = result.tolist()
    return values


def test_parts_are_replayed_on_the_tensors_that_they_were_recorded_on(device: torch.device) -> None:
    capture = CudaGraphCapture()
    for _ in range(2):
        assert recorded(capture, torch.ones(4, device=device)) == [1, 3, 5, 7]


def test_no_garbage_is_collected_during_a_recording(device: torch.device) -> None:
    """The collector could destroy a graph that is no longer used, and that breaks a recording."""
    with CudaGraphCapture().recording():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_other_threads_allocate_memory_during_a_recording(device: torch.device) -> None:
    """Other models of the process serve meanwhile; 64 MiB are more than the allocator has at hand."""
    capture, given = CudaGraphCapture(), torch.ones(4, device=device)
    sums: list[float] = []
    other = threading.Thread(target=lambda: sums.append(float(torch.ones(2**24, device=device).sum())))
    with capture.recording():
        capture.begin(device)
        result = given * 2
        other.start()
        other.join(30)
        replay = capture.end()
    replay()
    torch.cuda.synchronize()
    assert sums == [2**24] and result.tolist() == [2, 2, 2, 2]


def test_after_an_error_of_the_model_the_next_recording_succeeds(device: torch.device) -> None:
    capture, given = CudaGraphCapture(), torch.ones(4, device=device)
    with pytest.raises(ValueError, match="of the model"), capture.recording():
        capture.begin(device)
        given * 2
        raise ValueError("of the model")
    assert gc.isenabled()
    assert recorded(capture, given) == [1, 3, 5, 7]


def test_after_an_operation_that_no_graph_can_hold_the_device_still_computes(device: torch.device) -> None:
    """CUDA ends a recording in which Python asks for a value; the error names it and memory can be had again."""
    capture, given = CudaGraphCapture(), torch.ones(4, device=device)
    with pytest.raises(RuntimeError, match="captur"), capture.recording():
        capture.begin(device)
        (given * 2).sum().item()
    assert gc.isenabled()
    assert float(torch.ones(2**24, device=device).sum()) == 2**24
    assert recorded(CudaGraphCapture(), given) == [1, 3, 5, 7]
