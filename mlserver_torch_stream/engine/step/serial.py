"""Serves models that cannot be batched here: runs transformers' ``generate`` for one sequence at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from mlserver_torch_stream.engine.api import EngineRequest, EngineStats
from mlserver_torch_stream.engine.devices import input_device
from mlserver_torch_stream.engine.failures import log_failure
from mlserver_torch_stream.engine.pipeline.stages import Pipeline
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.sampling.row_sampler import RowSampler
from mlserver_torch_stream.engine.sampling.sampler import SamplerFactory, sample
from mlserver_torch_stream.engine.scheduler.queue import FairQueue
from mlserver_torch_stream.engine.step.batcher import Batcher, Deliver, Poll, YieldDevice, check_unscored
from mlserver_torch_stream.errors import GenerationFailed
from mlserver_torch_stream.types import FinishReason


class SerialBatcher(Batcher):
    """Runs one request after another.

    It samples tokens, ends sequences and makes events as ``ContinuousBatcher`` does.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        samplers: SamplerFactory,
        *,
        max_num_seqs: int,
        check_devices: Callable[[], None] = lambda: None,
        pipeline: Pipeline | None = None,
    ) -> None:
        """With a ``pipeline`` the model's calls run in the pipeline's stages, which other engines may use as well."""
        super().__init__(EngineStats())
        self._model = model
        # A request's parameters already include the defaults of the model's files: ``generate`` must not apply them
        # again.
        model.generation_config = GenerationConfig(pad_token_id=0)
        self._device = input_device(model)
        self._samplers = samplers
        self._max_num_seqs = max_num_seqs
        self._check_devices = check_devices
        self._pipeline = pipeline
        self._waiting = FairQueue()
        self._running = 0

    def refusal(self, sequences: int, prompt: int, final_length: int) -> str | None:
        if sequences <= self._max_num_seqs:
            return None
        return f"{sequences} sequences are more than the {self._max_num_seqs} allowed"

    def check(self, request: EngineRequest) -> None:
        check_unscored(request, "this model, which is served one request at a time")

    def add(self, request: RequestState) -> None:
        self._waiting.add(request)
        self._gauge()

    def evict(self, requests: Sequence[RequestState]) -> None:
        """Removes waiting requests immediately. A running sequence that has ended stops at its next token."""
        for request in requests:
            if request in self._waiting:
                self._waiting.remove(request)
        self._gauge()

    def step(self, deliver: Deliver, poll: Poll, yield_device: YieldDevice) -> bool:
        request = self._waiting.admit(lambda request: True)
        if request is None:
            return False
        request.started_at = time.monotonic()
        self._running = 1
        self._gauge()
        try:
            self._samplers.begin(request)
        except Exception as error:
            self._fail(request.sequences, error, deliver)
        for sequence in request.sequences:
            if not _ended(sequence):
                self._generate(sequence, deliver, poll, yield_device)
        self._running = 0
        self._gauge()
        return True

    def count_tokens(self, tokens: int) -> None:
        """Counts a step and the tokens that it added to a sequence."""
        self.count(decode_steps=1, generation_tokens=tokens)
        self._gauge()

    def _gauge(self) -> None:
        self.stats = EngineStats(
            **self._counts,
            running_sequences=self._running,
            waiting_requests=len(self._waiting),
            waiting_tokens=self._waiting.tokens,
        )

    def _generate(self, sequence: SequenceState, deliver: Deliver, poll: Poll, yield_device: YieldDevice) -> None:
        request, sampler = sequence.request, sequence.sampler
        assert sampler is not None
        self.progress.at(f"the prefill of {len(request.prompt)} tokens by generate", len(request.prompt))
        try:
            prompt = torch.tensor([request.prompt], device=self._device)
            generate = partial(
                self._model.generate,
                prompt,
                attention_mask=torch.ones_like(prompt),  # otherwise every id that equals the padding id would be masked
                max_new_tokens=request.max_tokens,
                logits_processor=[_Chooser(self, sequence, sampler, deliver)],
                stopping_criteria=[_Ended(sequence, poll, yield_device)],
            )
            generate() if self._pipeline is None else self._pipeline.run(generate)
        except Exception as error:
            self._fail([sequence], error, deliver)

    def _fail(self, sequences: Sequence[SequenceState], error: Exception, deliver: Deliver) -> None:
        failure = log_failure("generation", error)
        self._check_devices()
        for sequence in sequences:
            sequence.finish(FinishReason.ERROR, failure)
        deliver(sequences)


class _Chooser(LogitsProcessor):  # type: ignore[misc]
    """Chooses the next token as the batched engine does, delivers it, and makes ``generate`` use it."""

    def __init__(self, batcher: SerialBatcher, sequence: SequenceState, sampler: RowSampler, deliver: Deliver) -> None:
        self._batcher = batcher
        self._sequence = sequence
        self._sampler = sampler
        self._deliver = deliver

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        (choice,) = sample(scores, [self._sampler])
        if isinstance(choice, GenerationFailed):
            raise choice
        had = len(self._sequence.tokens)
        self._sampler.accept(choice.token_id)
        self._sequence.accept(choice.token_id, choice.logprob)
        self._sequence.write()
        self._batcher.count_tokens(len(self._sequence.tokens) - had)
        self._deliver([self._sequence])
        forced = torch.full_like(scores, -torch.inf)
        forced[:, choice.token_id] = 0
        return forced


class _Ended(StoppingCriteria):  # type: ignore[misc]
    """After each token, polls the engine, yields the device to other engines, and stops ``generate`` at the end."""

    def __init__(self, sequence: SequenceState, poll: Poll, yield_device: YieldDevice) -> None:
        self._sequence = sequence
        self._poll = poll
        self._yield_device = yield_device

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._poll()
        self._yield_device()
        return torch.full((1,), _ended(self._sequence), device=input_ids.device)


def _ended(sequence: SequenceState) -> bool:
    return sequence.finish_reason is not None or sequence.request.mailbox.closed_at is not None
