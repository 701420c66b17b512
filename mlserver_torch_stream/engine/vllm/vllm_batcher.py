"""Runs the sequences of an engine in vLLM's worker: a fair queue before it, text and stop strings after it.

vLLM makes the batches. The worker has at most ``max_num_seqs`` sequences and a quarter, so that vLLM always finds one
to run and the others wait in the fair queue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from mlserver_torch_stream.engine.api import EngineRequest, EngineStats
from mlserver_torch_stream.engine.failures import log_failure
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.scheduler.queue import FairQueue
from mlserver_torch_stream.engine.step.batcher import Batcher, Deliver, Poll, YieldDevice
from mlserver_torch_stream.engine.vllm.messages import (
    COUNTS,
    MAX_MESSAGE,
    Addition,
    Output,
    Ready,
    WorkerStats,
    encode_additions,
)
from mlserver_torch_stream.engine.vllm.sampling import SamplingWriter, as_lark
from mlserver_torch_stream.engine.vllm.worker_process import WorkerProcess
from mlserver_torch_stream.errors import GenerationFailed, InvalidInput
from mlserver_torch_stream.handlers.frames import encode_frame
from mlserver_torch_stream.types import FinishReason, TokenLogprob

_STEP = "vllm"  # the key of the worker's step among the work that the watchdog sees
_IDS_PER_MESSAGE = MAX_MESSAGE // 8
_COUNTERS = {"steps": "decode_steps"}  # the worker's name of a counter, and ours


class VllmBatcher(Batcher):
    """Gives its sequences to a worker. While there is none yet, it takes no requests."""

    def __init__(self, start: Callable[[], WorkerProcess], writer: SamplingWriter, ready: Ready) -> None:
        """``start`` starts a worker, which need not be ready; it may block. ``ready``: what the model's worker says."""
        super().__init__(EngineStats(kv_cache_budget=ready.kv_cache_bytes))
        self._writer = writer
        self._ready = ready
        self._max_in_worker = ready.max_num_seqs + max(1, ready.max_num_seqs // 4)
        self._waiting = FairQueue()
        self._running: dict[int, SequenceState] = {}  # in the worker, by number
        self._requests: dict[int, RequestState] = {}  # of the running sequences, which do not keep them alive
        self._last_number = 0
        self._worker_stats = WorkerStats()
        self._wake: Callable[[], object] = lambda: None
        self._process: WorkerProcess | None = None
        self._worker: WorkerProcess | None = None  # the process, once it is ready
        self._failure: BaseException | None = None  # why it will never be
        self._closed = False
        self._start = start
        self.progress.launched(_STEP, "the start of vLLM")

    def begin(self) -> None:
        """Starts a worker. Blocks until it is ready; raises LoadFailed."""
        self._process = process = self._start()
        try:
            process.ready.result()
        except BaseException:
            process.wait()
            raise
        self.progress.completed(_STEP)
        self._worker = process
        process.listen(self._wake)

    def begin_in_thread(self) -> None:
        """Starts a worker, and wakes the engine's thread when it is ready or has failed."""
        threading.Thread(target=self._begin, name="vllm-start", daemon=True).start()

    def _begin(self) -> None:
        try:
            self.begin()
        except BaseException as error:
            self._failure = error
        if self._closed and self._worker is not None:
            self._worker.wait()
        self._wake()

    # --- from any thread ---

    def refusal(self, sequences: int, prompt: int, final_length: int) -> str | None:
        if sequences <= self._ready.max_num_seqs:
            return None
        return f"{sequences} sequences are more than the {self._ready.max_num_seqs} allowed"

    def check(self, request: EngineRequest) -> None:
        self._writer.check(request)

    @property
    def trouble(self) -> str | None:
        return None if self._worker is not None else "vLLM is being started again"

    def end_step(self, error: BaseException) -> bool:
        if self._process is None:
            return False
        self.progress.completed(_STEP)
        self._process.kill(f"was killed: {error}")
        return True

    # --- on the engine's thread ---

    def attach(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        if (worker := self._worker) is not None:
            worker.listen(wake)

    def add(self, request: RequestState) -> None:
        self._waiting.add(request)
        self._gauge()

    def evict(self, requests: Sequence[RequestState]) -> None:
        for request in requests:
            if request in self._waiting:
                self._waiting.remove(request)
        left = set(requests)
        self._abort([number for number, request in self._requests.items() if request in left])
        self._gauge()

    def step(self, deliver: Deliver, poll: Poll, yield_device: YieldDevice) -> bool:
        if self._failure is not None:
            raise self._failure
        worker = self._worker
        if worker is None:
            return False
        changed: dict[SequenceState, None] = {}
        held = list(self._requests.values())  # a sequence does not keep its request alive until it is delivered
        for received in worker.take():
            self._count(received.stats)
            changed.update(dict.fromkeys(filter(None, map(self._take, received.outputs))))
        self._write(changed, deliver)
        del held
        if worker.lost is not None:
            raise worker.lost
        self._admit(worker, deliver)
        self._gauge()
        return False

    def close(self) -> None:
        self._closed = True
        if self._process is not None:
            self._process.wait()

    def _take(self, output: Output) -> SequenceState | None:
        """Gives a sequence its new tokens. None: it has ended on this side already."""
        sequence = self._running.get(output.number)
        if sequence is None:
            return None
        request = self._requests[output.number]
        if output.cached is not None:
            request.cached_tokens = output.cached
        for position, token_id in enumerate(output.token_ids):
            entry = None if output.logprobs is None else output.logprobs[position]
            logprob = None if entry is None else TokenLogprob(token_id, entry.logprob, tuple(map(tuple, entry.top)))
            sequence.accept(token_id, logprob)
            if sequence.ended:
                break
        sequence.write()
        if sequence.finish_reason is None and output.reason is not None:
            sequence.finish(*_end(output))
        if output.reason is not None:
            self._forget(output.number)
        return sequence

    def _write(self, changed: Iterable[SequenceState], deliver: Deliver) -> None:
        sequences = list(changed)
        if sequences:
            deliver(sequences)
        self._abort([number for number, each in self._running.items() if each.finish_reason is not None])

    def _abort(self, numbers: Sequence[int]) -> None:
        """Ends sequences in the worker that have ended on this side."""
        for number in numbers:
            self._forget(number)
        if numbers and self._worker is not None:
            self._worker.send(encode_frame({"t": "abort", "ids": numbers}))

    def _forget(self, number: int) -> None:
        del self._running[number], self._requests[number]
        if not self._running:
            self.progress.completed(_STEP)

    def _admit(self, worker: WorkerProcess, deliver: Deliver) -> None:
        additions: list[Addition] = []
        ids = 0
        while ids < _IDS_PER_MESSAGE and (request := self._waiting.admit(self._fits)) is not None:
            request.started_at = time.monotonic()
            try:
                additions += self._additions(request)
            except Exception as error:
                request.finish(FinishReason.ERROR, log_failure("a request to vLLM", error))
                deliver(request.sequences)
                continue
            ids += len(request.prompt) * len(request.sequences)
        if additions:
            self.progress.launched(_STEP, "a step of vLLM")
            worker.send(encode_additions(additions))
        if ids >= _IDS_PER_MESSAGE:
            self._wake()

    def _fits(self, request: RequestState) -> bool:
        return not self._running or len(self._running) + len(request.sequences) <= self._max_in_worker

    def _additions(self, request: RequestState) -> list[Addition]:
        constraint, priority = request.input.constraint, request.input.priority
        grammar = None if constraint is None else as_lark(constraint)
        bad_words = self._writer.bad_words(request)
        additions = []
        for number, sequence in enumerate(request.sequences):
            params = self._writer.params(request, number)
            self._last_number += 1
            additions.append(Addition(self._last_number, request.prompt, params, priority, grammar, bad_words))
            self._running[self._last_number] = sequence
            self._requests[self._last_number] = request
        return additions

    def _count(self, stats: WorkerStats | None) -> None:
        if self._running:
            self.progress.launched(_STEP, "a step of vLLM")
        if stats is None:
            return
        self._worker_stats = stats
        self.count(**{_COUNTERS.get(name, name): getattr(stats, name) for name in COUNTS})

    def _gauge(self) -> None:
        """The worker's numbers are those of its newest step: it has none for sequences that came or went since."""
        inside, stats = len(self._running), self._worker_stats
        running = min(stats.running, inside)
        waiting = min(stats.waiting, inside - running)
        self.publish(
            running_sequences=running,
            waiting_requests=len(self._waiting) + waiting,
            waiting_tokens=self._waiting.tokens,
            prefilling_requests=inside - running - waiting,
            kv_cache_bytes=int(stats.kv_usage * self._ready.kv_cache_bytes) if inside else 0,
            kv_cache_budget=self._ready.kv_cache_bytes,
        )


def _end(output: Output) -> tuple[FinishReason, Exception | None]:
    """Returns why a sequence ends that vLLM has ended, and the error of its client."""
    if output.reason == "error":
        text = output.error or "vLLM failed"
        wrong = InvalidInput(output.field, text) if output.field else GenerationFailed(text)
        return FinishReason.ERROR, wrong
    if output.reason == "abort":
        return FinishReason.ERROR, GenerationFailed("vLLM has ended this sequence")
    return FinishReason(output.reason), None
