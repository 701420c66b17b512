"""Runs the sequences of an engine in vLLM's worker, with a fair queue before the worker, and text and stop strings
after it.

vLLM forms the batches. The worker has at most ``max_num_seqs`` sequences plus a quarter, so that vLLM always has a
sequence to run; further sequences wait in the fair queue.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from mlserver_torch_stream.engine.api import EngineRequest, EngineStats
from mlserver_torch_stream.engine.failures import VllmLost, drop_tracebacks, log_failure
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.scheduler.queue import FairQueue
from mlserver_torch_stream.engine.step.batcher import Batcher, Deliver, Poll, YieldDevice
from mlserver_torch_stream.engine.vllm.messages import (
    COUNTS,
    MAX_MESSAGE,
    Adapter,
    Addition,
    Logprobs,
    Output,
    Ready,
    WorkerStats,
)
from mlserver_torch_stream.engine.vllm.sampling import SamplingWriter, as_lark
from mlserver_torch_stream.engine.vllm.vllm_process import VllmProcess
from mlserver_torch_stream.errors import GenerationFailed, InvalidInput, LoadFailed, NotServing
from mlserver_torch_stream.handlers.frames import encode_frame
from mlserver_torch_stream.types import FinishReason, TokenLogprob

_STEP = "vllm"  # the key of the worker's step among the work that the watchdog sees
_STARTING = "vLLM is being started again"
_RESTART_S = 3600.0  # a start is no step: it may take far longer than ``step_timeout``
_IDS_PER_STEP = 2**23  # ids of prompts that are encoded before tokens are delivered again, some 0.1 s
_COUNTERS = {"steps": "decode_steps"}  # the worker's name of a counter, and ours


@dataclass(frozen=True)
class _Unload:
    name: str
    number: int
    done: Future[None]


class Adapters(Protocol):
    """The adapters of a model. ``numbers`` also has those that are being unloaded; new requests may use ``names``."""

    @property
    def numbers(self) -> Mapping[str, int]: ...

    @property
    def names(self) -> frozenset[str]: ...

    def lost(self, missing: Mapping[int, str]) -> None:
        """Forgets adapters that a new worker could not load, by number with the reason. Any thread may call it."""


class VllmBatcher(Batcher):
    """Passes its sequences to a worker. Requests are accepted only when a worker is ready."""

    def __init__(
        self,
        start: Callable[[], VllmProcess],
        writer: SamplingWriter,
        ready: Ready,
        adapters: Adapters,
    ) -> None:
        """``start`` starts a worker. This call may block, but need not wait until the worker is ready.

        ``ready`` is the first worker's report.
        """
        super().__init__(EngineStats(kv_cache_budget=ready.kv_cache_bytes))
        self._writer = writer
        self._ready = ready
        self._max_in_worker = ready.max_num_seqs + max(1, ready.max_num_seqs // 4)
        self._waiting = FairQueue()
        self._running: dict[int, SequenceState] = {}  # the sequences that the worker has, by number
        # The requests of the running sequences; a sequence does not keep its request alive.
        self._requests: dict[int, RequestState] = {}
        self._last_number = 0
        self._busy_since: float | None = None
        self._worker_stats = WorkerStats()
        self._wake: Callable[[], object] = lambda: None
        self._process: VllmProcess | None = None
        self._worker: VllmProcess | None = None  # None until a worker is ready
        self._failure: BaseException | None = None  # why no worker will ever be ready
        self._closing = threading.Event()
        self._starting: threading.Thread | None = None
        self._start = start
        self._adapters = adapters
        self._unloads: queue.SimpleQueue[_Unload] = queue.SimpleQueue()  # posted by the event loop
        self._unload_lock = threading.Lock()  # no unload is posted after the last look
        self._closed = False
        self._leaving: list[_Unload] = []  # adapters that streams may still use
        self._unloaded: set[int] = set()  # the numbers of the adapters that the worker was told to unload

    def begin(self, delay: float = 0.0) -> None:
        """Starts a worker after ``delay`` seconds. Blocks until the worker is ready, for at most an hour. Raises
        LoadFailed.
        """
        if self._closing.wait(delay):
            raise LoadFailed("the engine was shut down")
        self._process = process = self._start()
        try:
            if self._closing.is_set():
                process.kill()
            if not wait({process.ready}, _RESTART_S).done:
                raise LoadFailed(f"vLLM was started again, but was not ready within {_RESTART_S:g} s")
            if missing := process.ready.result().missing:
                self._adapters.lost(missing)
        except BaseException:
            process.wait()
            raise
        self._worker = process
        process.listen(self._wake)

    def begin_in_thread(self, delay: float) -> None:
        """As ``begin``, but wakes the engine's thread when the worker is ready or has failed."""
        self._starting = threading.Thread(target=self._begin, args=(delay,), name="vllm-start", daemon=True)
        self._starting.start()

    def _begin(self, delay: float) -> None:
        try:
            self.begin(delay)
        except BaseException as error:
            self._failure = error
        self._wake()

    # --- from any thread ---

    @property
    def trouble(self) -> str | None:
        return _STARTING if self._worker is None or self._worker.ending else None

    def refusal(self, sequences: int, prompt: int, final_length: int) -> str | None:
        if sequences <= self._ready.max_num_seqs:
            return None
        return f"{sequences} sequences are more than the {self._ready.max_num_seqs} allowed"

    def check(self, request: EngineRequest) -> None:
        self._writer.check(request)
        if request.adapter is not None and request.adapter not in self._adapters.names:
            raise _unloaded(request.adapter)

    def end_step(self, error: BaseException) -> bool:
        if self._process is None:
            return False
        self.progress.completed(_STEP)
        self._process.kill(f"was killed: {error}")
        return True

    def load_adapter(self, adapter: Adapter) -> Future[None]:
        """Loads an adapter. If that fails, the future raises LoadFailed with vLLM's reason, or VllmLost."""
        if self._worker is None or self._worker.ending:
            raise NotServing(_STARTING)
        return self._worker.call(lambda call: encode_frame(adapter.message(call)))

    def unload_adapter(self, name: str, number: int) -> Future[None]:
        """Unloads an adapter as soon as no request uses it any more. Later requests must not name this adapter."""
        unload = _Unload(name, number, Future())
        unload.done.set_running_or_notify_cancel()  # the waiting caller may leave; the adapter is still unloaded
        with self._unload_lock:
            if self._closed:  # the adapter is gone with the worker, and the next worker does not load it
                unload.done.set_result(None)
            else:
                self._unloads.put(unload)
        self._wake()
        return unload.done

    # --- on the engine's thread ---

    def attach(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        if (worker := self._worker) is not None:
            worker.listen(wake)
        if self._failure is not None:
            wake()

    def add(self, request: RequestState) -> None:
        self._waiting.add(request)
        self._gauge()

    def evict(self, requests: Sequence[RequestState]) -> None:
        """Removes the requests.

        The next step ends their sequences in the worker, just as it does for every sequence that has ended on this
        side.
        """
        for request in requests:
            if request in self._waiting:
                self._waiting.remove(request)
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
        self._abort([number for number, each in self._running.items() if each.finish_reason is not None])
        self._gauge()  # before a reader sees the end
        deliver(list(changed))
        del held
        if worker.lost is not None:
            raise worker.lost
        self._admit(worker, deliver)
        self._unload(worker)
        self._gauge()
        return False

    def busy_seconds(self, began: float, ended: float) -> float:
        """Returns for how many seconds vLLM had sequences. The time in steps would be too short, because vLLM also
        works between the steps."""
        since, self._busy_since = self._busy_since, ended if self._running else None
        return 0.0 if since is None else ended - since

    def close(self) -> None:
        self._closing.set()
        if (process := self._process) is not None and process.lost is None:  # else the next start waits for it
            process.wait()
        if self._starting is not None:
            self._starting.join()
        with self._unload_lock:
            self._closed = True
        self._take_unloads()
        for unload in self._leaving:  # the next worker does not load it
            unload.done.set_result(None)

    def _unload(self, worker: VllmProcess) -> None:
        """Sends unloads that no request blocks any more.

        When an unload arrives here, requests that were submitted before it may still be in the engine's inbox, so it is
        sent in the next step at the earliest.
        """
        if self._leaving:
            used = {request.input.adapter for request in (*self._waiting, *self._requests.values())}
            for unload in [each for each in self._leaving if each.name not in used]:
                answer = worker.call(partial(_unload_message, unload.number))
                self._leaving.remove(unload)
                self._unloaded.add(unload.number)
                answer.add_done_callback(partial(_pass_on, unload.done))
        if self._take_unloads():
            self._wake()

    def _take_unloads(self) -> bool:
        """Returns whether there are new unloads."""
        taken = len(self._leaving)
        while not self._unloads.empty():
            self._leaving.append(self._unloads.get())
        return len(self._leaving) > taken

    def _take(self, output: Output) -> SequenceState | None:
        """Adds its new tokens to a sequence. Returns None if the sequence has already ended on this side."""
        sequence = self._running.get(output.number)
        if sequence is None or sequence.finish_reason is not None:  # its abort follows these outputs
            return None
        request = self._requests[output.number]
        if output.scores is not None:
            _keep_scores(request, sequence, output.scores)
            return sequence
        if output.cached is not None:
            request.cached_tokens = output.cached
        if request.max_tokens == 0 and output.token_ids:  # vLLM has generated the one token that it must
            sequence.finish(FinishReason.LENGTH)
        for position, token_id in enumerate(output.token_ids if request.max_tokens else ()):
            entry = None if output.logprobs is None else output.logprobs[position]
            sequence.accept(token_id, None if entry is None else _token_logprob(token_id, entry, len(entry.top)))
            if sequence.ended:
                break
        sequence.write()
        if sequence.finish_reason is None and output.reason is not None:
            sequence.finish(*_end(output))
        if output.reason is not None:
            self._forget(output.number)
        return sequence

    def _abort(self, numbers: Sequence[int]) -> None:
        """Ends those sequences in the worker that have ended on this side."""
        for number in numbers:
            self._forget(number)
        if numbers and self._worker is not None:
            self._worker.send(encode_frame({"t": "abort", "ids": numbers}))

    def _forget(self, number: int) -> None:
        del self._running[number], self._requests[number]
        if not self._running:
            self.progress.completed(_STEP)

    def _admit(self, worker: VllmProcess, deliver: Deliver) -> None:
        ids = 0
        while ids < _IDS_PER_STEP and (request := self._waiting.admit(self._fits)) is not None:
            request.started_at = time.monotonic()
            try:
                frame = self._addition(request).encode()
                if len(frame) > MAX_MESSAGE:  # it would end the worker, and with it the answers of all other clients
                    raise InvalidInput("request", f"{len(frame)} bytes in a message to vLLM, at most {MAX_MESSAGE}")
            except Exception as error:
                failure = error if isinstance(error, InvalidInput) else log_failure("a request to vLLM", error)
                drop_tracebacks(error)
                request.finish(FinishReason.ERROR, failure)
                deliver(request.sequences)
                continue
            for number, sequence in enumerate(request.sequences, self._last_number + 1):
                self._running[number] = sequence
                self._requests[number] = request
            self._last_number += len(request.sequences)
            self.progress.launched(_STEP, "a step of vLLM")
            worker.send(frame)
            ids += len(request.prompt)
        if ids >= _IDS_PER_STEP:
            self._wake()

    def _fits(self, request: RequestState) -> bool:
        return not self._running or len(self._running) + len(request.sequences) <= self._max_in_worker

    def _addition(self, request: RequestState) -> Addition:
        constraint = request.input.constraint
        return Addition(
            self._last_number + 1,
            request.prompt,
            self._writer.params(request),
            len(request.sequences),
            request.input.priority,
            None if constraint is None else as_lark(constraint.grammar),
            self._writer.bad_words(request),
            self._adapter(request),
            request.params.cache_salt,
        )

    def _adapter(self, request: RequestState) -> int | None:
        name = request.input.adapter
        if name is None:
            return None
        number = self._adapters.numbers.get(name)
        if number is None or number in self._unloaded:  # while the prompt came in pieces
            raise _unloaded(name)
        return number

    def _count(self, stats: WorkerStats | None) -> None:
        if self._running:
            self.progress.launched(_STEP, "a step of vLLM")
        if stats is None:
            return
        self._worker_stats = stats
        self.count(**{_COUNTERS.get(name, name): getattr(stats, name) for name in COUNTS})

    def _gauge(self) -> None:
        """Takes a new snapshot of the stats.

        The worker's numbers describe its newest step, so sequences that have come or gone since then are not
        considered.
        """
        inside, stats = len(self._running), self._worker_stats
        running = min(stats.running, inside)
        waiting = min(stats.waiting, inside - running)
        self.stats = EngineStats(
            **self._counts,
            running_sequences=running,
            waiting_requests=len(self._waiting) + waiting,
            waiting_tokens=self._waiting.tokens,
            prefilling_requests=inside - running - waiting,
            kv_cache_bytes=int(stats.kv_usage * self._ready.kv_cache_bytes) if inside else 0,
            kv_cache_budget=self._ready.kv_cache_bytes,
        )


def _unloaded(name: str) -> InvalidInput:
    return InvalidInput("lora_name", f"the adapter {name!r} has been unloaded")


def _unload_message(number: int, call: int) -> bytes:
    return encode_frame({"t": "unload_adapter", "call": call, "id": number})


def _pass_on(done: Future[None], answer: Future[None]) -> None:
    error = answer.exception()
    if error is None or isinstance(error, VllmLost):  # the adapter is gone with the worker
        done.set_result(None)
    else:
        done.set_exception(error)


def _token_logprob(token_id: int, entry: Logprobs, top: int) -> TokenLogprob:
    return TokenLogprob(token_id, entry.logprob, tuple(map(tuple, entry.top[:top])))


def _keep_scores(request: RequestState, sequence: SequenceState, scores: Sequence[Logprobs]) -> None:
    """Keeps the scores of the request's prompt, which each of its sequences gets."""
    first, *others = request.prompt
    if len(scores) != len(others):
        error = GenerationFailed(f"vLLM has sent {len(scores)} scores for a prompt of {len(request.prompt)} tokens")
        sequence.finish(FinishReason.ERROR, error)
    elif not request.scores:
        top = request.params.prompt_logprobs or 0
        scored = (_token_logprob(token_id, entry, top) for token_id, entry in zip(others, scores, strict=True))
        request.scores = [TokenLogprob(first, None), *scored]


def _end(output: Output) -> tuple[FinishReason, Exception | None]:
    """Returns why vLLM has ended a sequence, and the error for its client."""
    if output.reason == "error":
        text = output.error or "vLLM failed"
        wrong = InvalidInput(output.field, text) if output.field else GenerationFailed(text)
        return FinishReason.ERROR, wrong
    if output.reason == "abort":
        return FinishReason.ERROR, GenerationFailed("vLLM has ended this sequence")
    return FinishReason(output.reason), None
