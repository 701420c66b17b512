"""Batches continuously: prompts are prefilled in chunks, join a running batch, decode together and leave it.

Knows nothing of threads, event loops or requests; it carries out the scheduler's decisions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import cached_property

from mlserver_torch_stream.engine.batching.batcher import Deliver
from mlserver_torch_stream.engine.batching.sequence_batches import SequenceBatches, decode_of, prefill_of
from mlserver_torch_stream.engine.forward.interface import JointForward
from mlserver_torch_stream.engine.scheduling.scheduler import DecodeBatch, PrefillChunk

logger = logging.getLogger(__name__)

# Keys and values of so many tokens are copied in the time of prefilling one; 13 to 50 (benchmarks/LOG.md).
_COPIED_PER_PREFILLED = 16


class ContinuousBatcher(SequenceBatches):
    """A step prefills the scheduler's chunks, decodes all batches, samples, and drops the sequences that ended."""

    @cached_property
    def _joint(self) -> JointForward | None:
        return self._decode_forward if isinstance(self._decode_forward, JointForward) else None

    def step(self, deliver: Deliver, poll: Callable[[], object]) -> bool:
        prefilled = self._prefill_chunks(deliver)
        batches = [batch for batch in self._scheduler.batches if batch.sequences]
        if self._joint is not None and len(batches) > 1:
            self._decode_together(self._joint, batches, deliver)
        else:
            for batch in batches:
                self._decode(batch, deliver)
        self._retire()
        self._gauge()
        return prefilled or bool(batches)

    def _prefill_chunks(self, deliver: Deliver) -> bool:
        """Prefills as many tokens as a step may. Tokens that the prefix cache holds leave room for the next prompts."""
        charge = self._scheduler.limits.prefill_charge
        spent = 0
        while chunks := self._next_chunks(spent=spent):
            self._gauge()  # an admitted request no longer waits, however long the step takes
            for chunk in chunks:
                spent += charge(self._prefill(chunk, deliver))
        return spent > 0

    def _prefill(self, chunk: PrefillChunk, deliver: Deliver) -> int:
        """Returns to how many prefilled tokens the work amounts."""
        request, known = chunk.request, chunk.request.prefilled
        try:
            ids = self._begin_chunk(chunk)
            work = len(ids) + (request.prefilled - known) // _COPIED_PER_PREFILLED
            self.progress.at(prefill_of(ids), len(ids))
            logits = self._prefill_forward([ids], self._prefills[request])
            self._advance(request, ids)
            if request.sealed and request.ready_ids == 0 and self._choose_first_tokens(request, logits):
                self._drop_ended(self._join_batch(request))
        except Exception as error:
            self._fail_prefill(request, error, deliver)
            return chunk.count
        self._retire()  # before the events, so that their readers find correct gauges
        deliver(request.sequences)
        return work

    def _decode_together(self, forward: JointForward, batches: Sequence[DecodeBatch], deliver: Deliver) -> None:
        began = time.monotonic()
        for batch in batches:
            self._drop_ended(batch)
        batches = [batch for batch in batches if batch.sequences]
        parts = [([[sequence.tokens[-1]] for sequence in batch.sequences], self._caches[batch]) for batch in batches]
        self.progress.at(decode_of(sum(len(batch.sequences) for batch in batches)))
        try:
            found = forward.together(parts) if parts else []
        except Exception as error:
            logger.warning("a decode step of %d batches failed, each is tried alone: %s", len(batches), error)
            for batch in batches:
                self._decode(batch, deliver)
            return
        self.count(decode_steps=bool(found))
        for batch, logits in zip(batches, found, strict=True):
            self._finish_decode(batch, logits, began, deliver)

    def _decode(self, batch: DecodeBatch, deliver: Deliver) -> None:
        began = time.monotonic()
        self._drop_ended(batch)
        if not batch.sequences:
            return
        self.progress.at(decode_of(len(batch.sequences)))
        try:
            logits = self._decode_forward([[sequence.tokens[-1]] for sequence in batch.sequences], self._caches[batch])
        except Exception as error:
            self._isolate(batch, error, deliver)
            return
        self.count(decode_steps=1)
        self._finish_decode(batch, logits, began, deliver)
