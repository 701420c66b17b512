"""Takes sequences from the first chunk of their prompt to their last token: caches, batches, sampling, failures.

Knows nothing of threads or event loops, nor of the order of forwards: the step of a subclass decides that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.byte_size import format_bytes
from mlserver_torch_stream.engine.api import EngineStats
from mlserver_torch_stream.engine.batching.batcher import Batcher, Deliver
from mlserver_torch_stream.engine.client_messages import in_short
from mlserver_torch_stream.engine.fault_injection import FaultInjector
from mlserver_torch_stream.engine.forward.interface import Forward, JointForward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.kv_cache.bytes_per_token import CacheCost
from mlserver_torch_stream.engine.kv_cache.prefix_cache import PrefixCache
from mlserver_torch_stream.engine.kv_cache.row_cache import CacheLayout, RowCache
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.sampling.sampler import SampledToken, sample
from mlserver_torch_stream.engine.sampling.sampler_factory import SamplerFactory
from mlserver_torch_stream.engine.scheduling.scheduler import (
    DecodeBatch,
    PrefillChunk,
    Scheduler,
    SchedulerLimits,
    joint_limits,
)
from mlserver_torch_stream.errors import GenerationFailed
from mlserver_torch_stream.types import FinishReason

logger = logging.getLogger(__name__)

# Sequences that end in one step and go into the prefix cache: copying more would hold up the others.
_MOST_CACHED_PER_STEP = 2


class SequenceBatches(Batcher):
    """Holds the caches of prompts that are prefilled, and the batches. Its subclasses run the forwards.

    ``prefix_bytes`` of ``cache_bytes`` are for the prefix cache, if the model can go on from a prefix.
    ``check_devices`` raises if a device is lost. No request is to blame for that, so the error ends the thread.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        samplers: SamplerFactory,
        *,
        cost: CacheCost,
        cache_bytes: int,
        max_num_seqs: int,
        prefill_tokens: int | None,
        prefix_bytes: int = 0,
        forward: Forward | None = None,
        layout: CacheLayout | None = None,
        stages: int = 1,
        faults: FaultInjector | None = None,
        check_devices: Callable[[], None] = lambda: None,
    ) -> None:
        forward = forward or ModelForward(model)
        self._prefill_forward = faults.wrap("prefill", forward) if faults else forward
        self._decode_forward = faults.wrap("decode", forward) if faults else forward
        self._layout = layout or CacheLayout(model.config)
        self._samplers = samplers
        # States cannot be cut to a prefix, and a model that takes prompts whole does not go on from one.
        prefix_bytes = prefix_bytes if prefill_tokens is not None and not self._layout.has_states else 0
        cache_bytes -= prefix_bytes
        super().__init__(EngineStats(kv_cache_budget=cache_bytes))
        limits = SchedulerLimits(max_num_seqs, prefill_tokens, cache_bytes, cost.of, stages)
        joint = isinstance(self._decode_forward, JointForward)
        self._scheduler = Scheduler(joint_limits(limits) if joint else limits)
        self._max_num_seqs = max_num_seqs
        self._check_devices = check_devices
        self._cache_bytes = cache_bytes
        self._prefixes = PrefixCache(prefix_bytes, cost)
        self._prefills: dict[RequestState, RowCache] = {}
        self._caches: dict[DecodeBatch, RowCache] = {}

    def refusal(self, sequences: int, prompt: int, final_length: int) -> str | None:
        if self._scheduler.fits_alone(sequences, final_length, prompt):
            return None
        return (
            f"{sequences} x {final_length} tokens never fit at most {self._max_num_seqs} sequences "
            f"and {format_bytes(self._cache_bytes)} of KV cache"
        )

    def add(self, request: RequestState) -> None:
        self._scheduler.add(request)
        self._gauge()

    def evict(self, requests: Sequence[RequestState]) -> None:
        gone = set(requests)
        for request in requests:
            self._drop(request)
        for batch in self._scheduler.batches:
            leaving = {row for row, sequence in enumerate(batch.sequences) if sequence.request in gone}
            if leaving:
                self._remove(batch, leaving)
        self._retire()

    # --- prefill ---

    def _next_chunks(
        self, busy: Collection[RequestState] = (), most: int | None = None, spent: int = 0
    ) -> list[PrefillChunk]:
        """Returns the scheduler's next chunks, and drops the caches that it frees for them."""
        chunks = self._scheduler.chunks(busy, most, spent)
        for request in self._scheduler.open_prompts.take_given_up():
            self._prefills.pop(request, None)
        return chunks

    def _fail_prefill(self, request: RequestState, error: Exception, deliver: Deliver) -> None:
        logger.error("prefill failed", exc_info=error)
        self._check_devices()
        self._drop(request)
        request.finish(FinishReason.ERROR, GenerationFailed(f"prefill failed: {in_short(error)}"))
        deliver(request.sequences)

    def _begin_chunk(self, chunk: PrefillChunk) -> list[int]:
        """Returns the chunk's ids, and makes the cache of a prompt at its first chunk."""
        request = chunk.request
        if request.started_at is None and request.sealed:
            request.started_at = time.monotonic()
        columns = self._scheduler.open_prompts.columns(request)
        if request.prefilled == 0:
            self._prefills[request] = self._begin(request, columns)
        elif self._prefills[request].allocated != (1, columns):  # the open prompt has grown since
            self._prefills[request].resize(1, columns)
        return request.prompt[request.prefilled : request.prefilled + chunk.count]

    def _advance(self, request: RequestState, ids: Sequence[int]) -> None:
        request.prefilled += len(ids)
        self.count(prefill_tokens=len(ids))

    def _begin(self, request: RequestState, columns: int) -> RowCache:
        """Makes the cache of a new prompt: empty, or with the prefix that the prefix cache has of it."""
        found = self._prefixes.begin(request.prompt) if self._prefixes.wanted and request.sealed else None
        if found is not None:
            cache, request.prefilled = found
            request.cached_tokens = request.prefilled
            self.count(prefix_cache_hit_tokens=request.prefilled)
            return cache
        cache = self._layout.cache(capacity=columns)
        cache.begin_row()
        return cache

    def _choose_first_tokens(self, request: RequestState, logits: torch.Tensor) -> bool:
        """Chooses the first tokens of a prefilled request. Returns False if they end all its sequences."""
        self._samplers.begin(request)
        choices = self._choose(logits.expand(request.params.n, -1), request.sequences)
        self._take(request.sequences, choices)
        self._cache_prompt(request, self._prefills[request], choices)
        if request.finished:
            self._drop(request)
        return not request.finished

    def _join_batch(self, request: RequestState) -> DecodeBatch:
        """Joins the sequences of a prefilled request to their batch. If it raises, the batch is as it was."""
        batch = self._scheduler.place(request)
        first = len(batch.sequences) - request.params.n
        try:
            self._join(batch, self._prefills.pop(request), request.params.n)
        except BaseException:
            self._scheduler.keep(batch, list(range(first)))
            raise
        return batch

    def _join(self, batch: DecodeBatch, prefilled: RowCache, rows: int) -> None:
        cache = self._caches.get(batch)
        if cache is None:
            cache = self._caches[batch] = self._layout.cache(batch.row_capacity, batch.column_capacity)
        elif cache.allocated != (batch.row_capacity, batch.column_capacity):
            cache.resize(batch.row_capacity, batch.column_capacity)
        cache.join(prefilled, rows)

    # --- decode ---

    def _finish_decode(self, batch: DecodeBatch, logits: torch.Tensor, began: float, deliver: Deliver) -> None:
        """Gives the sequences of a batch their next tokens from the logits of a decode step.

        Sequences that ended during the step get no token.
        """
        rows = [row for row, sequence in enumerate(batch.sequences) if sequence.finish_reason is None]
        sequences = [batch.sequences[row] for row in rows]
        choices = self._choose(logits, sequences, rows)
        zombies = sum(1 for sequence in batch.sequences if (sequence.request.mailbox.closed_at or began) < began)
        self.count(wasted_tokens=zombies)
        for row, choice in zip(rows, choices, strict=True):
            if isinstance(choice, GenerationFailed):
                self._caches[batch].clear_row(row)
        self._take(sequences, choices)
        finished = {row for row, sequence in enumerate(batch.sequences) if sequence.finish_reason is not None}
        if finished:
            self._cache_conversations(batch, finished)
            self._remove(batch, finished)
            self._retire()  # before the last events, so that their readers find correct gauges
        deliver(sequences)

    def _drop_ended(self, batch: DecodeBatch) -> None:
        """Drops the sequences that have ended, or whose streams were closed, since the last step."""
        gone = {
            row
            for row, sequence in enumerate(batch.sequences)
            if sequence.finish_reason is not None or sequence.request.mailbox.closed_at is not None
        }
        if gone:
            self._remove(batch, gone)

    def _take(self, sequences: Sequence[SequenceState], choices: Sequence[SampledToken | GenerationFailed]) -> None:
        for sequence, choice in zip(sequences, choices, strict=True):
            if isinstance(choice, GenerationFailed):
                sequence.finish(FinishReason.ERROR, choice)
                continue
            assert sequence.sampler is not None
            try:
                sequence.sampler.accept(choice.token_id)
                sequence.accept(choice.token_id, choice.logprob)
            except Exception as error:
                logger.exception("a token could not be taken")
                failure = GenerationFailed(f"token {choice.token_id} failed: {in_short(error)}")
                sequence.finish(FinishReason.ERROR, failure)
        self.count(generation_tokens=sum(isinstance(choice, SampledToken) for choice in choices))

    def _cache_conversations(self, batch: DecodeBatch, finished: set[int]) -> None:
        """Puts ended sequences into the prefix cache: the next turn of a chat begins with their prompt and text."""
        cache = self._caches[batch]
        for row in sorted(finished)[:_MOST_CACHED_PER_STEP]:
            sequence = batch.sequences[row]
            if sequence.finish_reason is not FinishReason.ERROR:
                ids = [*sequence.request.prompt, *sequence.tokens][: cache.lengths[row]]
                self._prefixes.offer(ids, cache, row, partial(cache.extract, row, spare=0))

    def _cache_prompt(
        self, request: RequestState, cache: RowCache, choices: Sequence[SampledToken | GenerationFailed]
    ) -> None:
        if not any(isinstance(choice, GenerationFailed) for choice in choices):  # otherwise the cache may hold NaN
            self._prefixes.offer(request.prompt, cache, 0, cache.compact)

    def _choose(
        self, logits: torch.Tensor, sequences: Sequence[SequenceState], rows: Sequence[int] | None = None
    ) -> list[SampledToken | GenerationFailed]:
        """Samples the next token of each sequence; if that raises, of each alone, so that only the culprit fails.

        ``rows`` are the sequences' rows of the logits; None: all rows.
        """
        if rows is not None and len(rows) < len(logits):
            logits = logits[rows]
        try:
            return sample(logits, [sequence.sampler for sequence in sequences if sequence.sampler is not None])
        except Exception as error:
            if len(sequences) > 1:
                return [self._choose(logits[row : row + 1], [sequence])[0] for row, sequence in enumerate(sequences)]
            logger.exception("sampling failed")
            self._check_devices()
            return [GenerationFailed(f"sampling failed: {in_short(error)}")]

    def _isolate(self, batch: DecodeBatch, error: Exception, deliver: Deliver) -> None:
        """Ends the sequences whose forward raises alone, after a decode step raised. The others go on."""
        logger.error("a decode step of %d sequences failed: %s", len(batch.sequences), error)
        self._check_devices()
        cache = self._caches[batch]
        failures = dict.fromkeys(range(len(batch.sequences)), error)
        if not self._layout.has_states and len(batch.sequences) > 1:
            failures = {row: failure for row in failures if (failure := self._try_alone(batch, cache, row))}
        # If no row fails alone, the batch itself does (for memory, say): it ends, as each retry would fail again.
        failures = failures or dict.fromkeys(range(len(batch.sequences)), error)
        sequences = [batch.sequences[row] for row in failures]
        for sequence, (row, failure) in zip(sequences, failures.items(), strict=True):
            cache.clear_row(row)
            sequence.finish(FinishReason.ERROR, GenerationFailed(f"decode failed: {in_short(failure)}"))
        self._remove(batch, set(failures))
        deliver(sequences)

    def _try_alone(self, batch: DecodeBatch, cache: RowCache, row: int) -> Exception | None:
        self.progress.at("the decode step of a sequence alone")
        try:
            self._decode_forward([[batch.sequences[row].tokens[-1]]], cache.extract(row))
        except Exception as error:
            return error
        return None

    # --- the end of sequences ---

    def _drop(self, request: RequestState) -> None:
        self._scheduler.drop(request)
        self._prefills.pop(request, None)

    def _remove(self, batch: DecodeBatch, leaving: set[int]) -> None:
        cache = self._caches[batch]
        order = cache.leave(leaving)
        shrink = self._scheduler.keep(batch, order)
        if not order:
            del self._caches[batch]  # expected requests get a new cache
        elif shrink:
            self._shrink(batch, cache)

    def _shrink(self, batch: DecodeBatch, cache: RowCache) -> None:
        try:
            cache.resize(batch.row_capacity, batch.column_capacity)
        except RuntimeError as error:  # no memory for the smaller copy beside the old one: it shrinks later
            logger.warning("a cache could not be made smaller: %s", error)

    def _retire(self) -> None:
        for batch in self._scheduler.retire():
            self._caches.pop(batch, None)
        self._gauge()

    def _gauge(self) -> None:
        scheduler = self._scheduler
        self._stats = replace(
            self._stats,
            running_sequences=scheduler.running_sequences,
            waiting_requests=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting.tokens,
            prefilling_requests=len(scheduler.prefilling),
            open_prompts=len(scheduler.open_prompts.requests),
            kv_cache_bytes=scheduler.reserved_bytes,
            prefix_cache_bytes=self._prefixes.bytes,
        )


def prefill_of(ids: Sequence[int]) -> str:
    return f"the prefill of {len(ids)} tokens"


def decode_of(sequences: int) -> str:
    return f"the decode step of {sequences} sequence{'s' if sequences > 1 else ''}"
