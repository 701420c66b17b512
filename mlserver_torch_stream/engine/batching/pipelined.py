"""Batches continuously over several devices: as many batches are in a forward as there are pipeline stages.

Knows nothing of how a forward passes from stage to stage. The engine's thread decides, samples and delivers. Forwards
run in threads of their own, and the engine's thread does not touch their caches until they complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.batching.batcher import Deliver
from mlserver_torch_stream.engine.batching.sequence_batches import SequenceBatches, decode_of, prefill_of
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.pipeline.in_flight import InFlightForwards
from mlserver_torch_stream.engine.pipeline.stage_locks import Pipeline, StagedForward
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.sampling.sampler import SampledToken
from mlserver_torch_stream.engine.sampling.sampler_factory import SamplerFactory
from mlserver_torch_stream.engine.scheduling.scheduler import DecodeBatch, PrefillChunk
from mlserver_torch_stream.errors import GenerationFailed


@dataclass(frozen=True, slots=True)
class _PrefillInFlight:
    """The ids of a prefill that is in a forward, and where they start in the prompt."""

    start: int
    ids: list[int]


class PipelinedBatcher(SequenceBatches):
    """A step waits for one forward to complete, where a step of ``ContinuousBatcher`` runs all of them in turn.

    Sequences stay in their batch: batches of unequal sizes cost no more than one batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        samplers: SamplerFactory,
        *,
        pipeline: Pipeline,
        forward: Forward | None = None,
        **options: Any,
    ) -> None:
        """``SequenceBatches`` takes the ``options``."""
        staged = StagedForward(forward or ModelForward(model), pipeline)
        super().__init__(model, samplers, forward=staged, stages=pipeline.depth, **options)
        self._depth = pipeline.depth
        self._aside = pipeline.aside
        most = pipeline.depth * (self._scheduler.limits.batches + 1)
        self._in_flight: InFlightForwards[DecodeBatch | RequestState, torch.Tensor] = InFlightForwards(
            most, pipeline.threads
        )
        self._chunks: dict[RequestState, _PrefillInFlight] = {}
        self._began: dict[DecodeBatch, float] = {}
        self._ready_to_join: list[RequestState] = []  # prefilled requests whose batches are in a forward

    def step(self, deliver: Deliver, poll: Callable[[], object]) -> bool:
        self._launch_prefills(deliver)
        for batch in self._scheduler.batches:
            if batch not in self._in_flight:
                self._launch_decode(batch)
        self._gauge()
        if not self._in_flight:
            return False
        self.progress.rest()  # while it waits for a forward
        completed = self._in_flight.completed()
        self.progress.at("a step of the pipeline")
        for key, future in completed:
            self.progress.completed(key)
            if isinstance(key, RequestState):
                self._complete_prefill(key, future, deliver)
            else:
                self._complete_decode(key, future, deliver)
        self._join_ready(deliver)
        self._retire()
        return True

    def evict(self, requests: Sequence[RequestState]) -> None:
        """Requests that are in a forward leave when that completes."""
        super().evict([request for request in requests if request not in self._in_flight])

    def close(self) -> None:
        self._in_flight.close()

    def _choose(
        self, logits: torch.Tensor, sequences: Sequence[SequenceState], rows: Sequence[int] | None = None
    ) -> list[SampledToken | GenerationFailed]:
        """Samples on another stream than the last stage, which computes the next batch already."""
        with self._aside(logits.device):
            return super()._choose(logits, sequences, rows)

    def _remove(self, batch: DecodeBatch, leaving: set[int]) -> None:
        if batch not in self._in_flight:
            super()._remove(batch, leaving)

    # --- prefill ---

    def _launch_prefills(self, deliver: Deliver) -> None:
        """Starts as many prefills as there are stages, so that sequences wait for one chunk's forward at most."""
        while len(self._chunks) < self._depth and (chunks := self._next_chunks(self._chunks, most=1)):
            self._launch_prefill(chunks[0], deliver)

    def _launch_prefill(self, chunk: PrefillChunk, deliver: Deliver) -> None:
        request = chunk.request
        try:
            ids = self._begin_chunk(chunk)
        except Exception as error:
            self._fail_prefill(request, error, deliver)
            return
        cache = self._prefills[request]
        self._chunks[request] = _PrefillInFlight(request.prefilled, ids)
        self.progress.launched(request, prefill_of(ids), len(ids))
        self._in_flight.launch(request, lambda: self._prefill_forward([ids], cache))

    def _complete_prefill(self, request: RequestState, future: Future[torch.Tensor], deliver: Deliver) -> None:
        prefill = self._chunks.pop(request)
        if request.finished:  # its stream was closed in the meantime
            self._drop(request)
            return
        try:
            logits = future.result()
            end = prefill.start + len(prefill.ids)
            stale = request.prefilled != prefill.start or request.prompt[prefill.start : end] != prefill.ids
            if stale or (end == len(request.prompt) and not self._scheduler.is_admitted(request)):
                request.prefilled = 0  # an open prompt became whole with other ids, or fewer: prefill starts anew
                return
            self._advance(request, prefill.ids)
            if request.sealed and request.ready_ids == 0 and self._choose_first_tokens(request, logits):
                self._ready_to_join.append(request)
        except Exception as error:
            self._fail_prefill(request, error, deliver)
            return
        self._retire()
        deliver(request.sequences)

    def _join_ready(self, deliver: Deliver) -> None:
        """Joins prefilled requests to the batches whose forwards have completed."""
        waiting, self._ready_to_join = self._ready_to_join, []
        for request in waiting:
            if request not in self._prefills:  # its stream was closed in the meantime
                continue
            if self._scheduler.target(request) in self._in_flight:
                self._ready_to_join.append(request)
                continue
            try:
                self._drop_ended(self._join_batch(request))
            except Exception as error:
                self._fail_prefill(request, error, deliver)

    # --- decode ---

    def _launch_decode(self, batch: DecodeBatch) -> None:
        self._drop_ended(batch)
        if not batch.sequences:
            return
        tokens = [[sequence.tokens[-1]] for sequence in batch.sequences]
        cache = self._caches[batch]
        self._began[batch] = time.monotonic()
        self.progress.launched(batch, decode_of(len(tokens)))
        self._in_flight.launch(batch, lambda: self._decode_forward(tokens, cache))

    def _complete_decode(self, batch: DecodeBatch, future: Future[torch.Tensor], deliver: Deliver) -> None:
        began = self._began.pop(batch)
        try:
            logits = future.result()
        except Exception as error:
            self._isolate(batch, error, deliver)
            return
        self.count(decode_steps=1)
        self._finish_decode(batch, logits, began, deliver)
