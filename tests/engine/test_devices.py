"""A lost device ends the engine, whatever was running on it; several devices share one budget."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.checks.selfcheck import check_batching
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.devices import check_devices
from mlserver_torch_stream.engine.sampling.sampler import SamplerFactory
from mlserver_torch_stream.engine.step.batcher import Batcher
from mlserver_torch_stream.engine.step.serial import SerialBatcher
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.types import FinishReason
from tests.engine.tiny import (
    VOCAB,
    batcher_over,
    byte_tokenizer,
    collect,
    greedy,
    prompt_of,
    run,
    running,
    tiny_model,
    until,
)


class Device:
    """Behaves like a GPU after an illegal access: every later call raises, even one that only queries the device."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.lost = False
        self.fail: Callable[[int], bool] = lambda queries: False  # loses the device at a forward of so many tokens
        model.get_input_embeddings().register_forward_pre_hook(self._forward)

    def _forward(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.lost = self.lost or self.fail(args[0].shape[1])
        self.check()

    def check(self) -> None:
        if self.lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture(params=["batched", "serial"])
def lent(model: PreTrainedModel, request: pytest.FixtureRequest) -> Iterator[tuple[EngineCore, Device]]:
    samplers = SamplerFactory(TextCodec(byte_tokenizer()), VOCAB)
    with torch.inference_mode():
        findings = check_batching(model)
    device = Device(model)
    batcher: Batcher = SerialBatcher(model, samplers, max_num_seqs=8, check_devices=device.check)
    if request.param == "batched":
        batcher = batcher_over(model, findings, prefill_tokens=8, check_devices=device.check)
    with running(model, batcher=batcher) as engine:
        yield engine, device


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_lost_device_ends_the_engine(lent: tuple[EngineCore, Device], phase: str) -> None:
    """Otherwise the engine would stay alive and ready, and fail every request."""
    engine, device = lent

    async def scenario() -> None:
        submitted = threading.Event()  # otherwise the engine may be dead before the second request
        device.fail = lambda queries: submitted.wait(30) and (queries <= 2) == (phase == "decode")
        streams = [engine.submit([EngineRequest(prompt_of(5), greedy(20))]) for _ in range(2)]
        submitted.set()
        for stream in streams:
            *_, last = [event async for event in stream]
            assert last.finish_reason is FinishReason.ERROR
            told = str(last.error)
            assert "the engine died: AcceleratorError" in told and "illegal memory" not in told, "that is for the log"
        await until(lambda: not engine.alive, "its end")

    run(scenario())


def test_what_fails_on_a_device_that_answers_costs_its_request_only(lent: tuple[EngineCore, Device]) -> None:
    engine, device = lent

    async def scenario() -> None:
        device.fail = lambda queries: (_ for _ in ()).throw(RuntimeError("once"))
        assert (await collect(engine, [EngineRequest(prompt_of(5), greedy(3))]))[0].finish_reason is FinishReason.ERROR
        device.fail = lambda queries: False
        assert (await collect(engine, [EngineRequest(prompt_of(5), greedy(3))]))[0].finish_reason is FinishReason.LENGTH

    run(scenario())


def test_a_host_is_never_lost() -> None:
    check_devices([torch.device("cpu"), torch.device("meta")])
