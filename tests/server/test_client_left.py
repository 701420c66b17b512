"""A stream that is left, seen from inside: its rows are free before the second decode step that begins afterwards.

The garbage collector is off, so that only our own clean-up can have freed them.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from mlserver import ModelSettings
from mlserver.settings import ModelParameters
from mlserver.types import InferenceRequest

from mlserver_torch_stream.engine.api import EngineStats
from mlserver_torch_stream.runtime import TorchStreamRuntime
from mlserver_torch_stream.server.state import server_state
from tests.server import v2
from tests.server.harness import PACKAGE_SPELLING

_BOUND_S = 60
_NAME = "left"
_LONG = v2.rest_body("Hello", max_tokens=900, ignore_eos=True)

Leave = Callable[[TorchStreamRuntime], Awaitable[None]]


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slows decode steps down, so that answers last until their readers have left."""
    monkeypatch.setenv("MLSERVER_TORCH_STREAM_FAULTS", "decode:1:slow=0.01")


async def _payloads(count: int = 1) -> AsyncIterator[InferenceRequest]:
    for _ in range(count):
        yield InferenceRequest(**_LONG)


async def _close_between_two_responses(runtime: TorchStreamRuntime) -> None:
    stream = runtime.predict_stream(_payloads())
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]


async def _close_from_another_task(runtime: TorchStreamRuntime) -> None:
    stream = runtime.predict_stream(_payloads(4))
    for _ in range(20):
        await anext(stream)
    await asyncio.create_task(stream.aclose())  # type: ignore[attr-defined]


async def _cancel_while_waiting_for_a_response(runtime: TorchStreamRuntime) -> None:
    await _cancelled(_read_all(runtime))


async def _cancel_an_answer_without_a_bound(runtime: TorchStreamRuntime) -> None:
    said = v2.bytes_tensor("messages", '[{"role": "user", "content": "Hello"}]')
    await _cancelled(runtime.predict(InferenceRequest(**v2.rest_body(inputs=[said], ignore_eos=True))))


async def _cancel_a_unary_call(runtime: TorchStreamRuntime) -> None:
    await _cancelled(runtime.predict(InferenceRequest(**_LONG)))


async def _read_all(runtime: TorchStreamRuntime) -> None:
    async for _ in runtime.predict_stream(_payloads()):
        pass


async def _cancelled(call: Awaitable[object]) -> None:
    task = asyncio.ensure_future(call)
    while _gauges().running_sequences == 0:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def _gauges() -> EngineStats:
    return server_state().engine_metrics.gauges()[_NAME, ""]


def _counters() -> EngineStats:
    """Returns the counters since the process began."""
    return server_state().engine_metrics.counters()[_NAME, ""]


async def _steps_after(runtime: TorchStreamRuntime, leave: Leave) -> int:
    """Returns the number of decode steps from when the stream was left until nothing was running."""
    await runtime.load()
    try:
        before = _counters()
        await leave(runtime)
        left_at = _counters().decode_steps
        while _gauges().running_sequences or _gauges().kv_cache_bytes:
            await asyncio.sleep(0.001)
        assert _counters().cancelled_sequences > before.cancelled_sequences
        return _counters().decode_steps - left_at
    finally:
        await runtime.unload()


@pytest.mark.usefixtures("no_garbage_collection", "slow_steps")
@pytest.mark.parametrize(
    "leave",
    [
        _close_between_two_responses,
        _close_from_another_task,
        _cancel_while_waiting_for_a_response,
        _cancel_a_unary_call,
        _cancel_an_answer_without_a_bound,
    ],
)
def test_rows_are_free_before_the_second_step(tiny_model: Path, leave: Leave) -> None:
    parameters = ModelParameters(uri=str(tiny_model))
    runtime = TorchStreamRuntime(ModelSettings(name=_NAME, implementation=PACKAGE_SPELLING, parameters=parameters))
    assert asyncio.run(asyncio.wait_for(_steps_after(runtime, leave), _BOUND_S)) <= 1
