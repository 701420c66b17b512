"""Starts the workers of one model, has each load the handler, and restarts workers that die."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any, Protocol

from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.free_port import free_port
from mlserver_torch_stream.handlers.config.model_config import HandlerConfig
from mlserver_torch_stream.handlers.pool.handler_request import HandlerJob
from mlserver_torch_stream.handlers.pool.rank_cancel import RankCancellation
from mlserver_torch_stream.handlers.pool.worker_process import WorkerProcess
from mlserver_torch_stream.handlers.pool.worker_rank import WorkerOrder
from mlserver_torch_stream.log_text import log_text
from mlserver_torch_stream.work_threads import in_thread

logger = logging.getLogger(__name__)
_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 30.0
_STABLE_S = 60.0  # a worker that has lived so long, or has answered, is restarted after the shortest delay


class WorkerRemoved(LoadFailed):
    """The worker was removed before it was ready."""


class WorkerSlot:
    """One worker of a model: its process, which may be replaced, and the requests that it runs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.worker: WorkerProcess | None = None
        self.started_at = time.time()  # seconds since the epoch
        self.starts = 0  # processes so far: messages of an earlier process are ignored
        self.starting: asyncio.Future[None] | None = None  # done when the ranks are ready, or one failed
        self.ranks_starting = 0  # ranks that are not ready yet
        self.ready = False
        self.leaving = False  # True: it finishes its requests and sequences, and takes no new ones
        self.removed = False  # True: it is being ended for good
        self.lost = True  # True: it has no process
        self.gone = asyncio.Event()  # set when a removed worker has ended
        self.active: dict[str, HandlerJob] = {}
        self.batches: deque[list[HandlerJob]] = deque()  # the running batch, then the batches that were sent ahead
        self.batch_s: float | None = None  # seconds that its latest batch took
        self.cancellation: RankCancellation | None = None  # None: its calls are not ended by all ranks together
        self.idle_since = 0.0
        self.timer: asyncio.TimerHandle | None = None  # runs while the slot has active requests
        self.active_at = 0.0  # the time of the last message
        self.delay_s = _FIRST_DELAY_S  # the delay before the next start
        self.ready_at = 0.0
        self.has_answered = False  # True: this process has answered a request

    @property
    def begun(self) -> list[HandlerJob]:
        """The requests that the worker runs now. A worker begins a batch when it has ended the previous batch."""
        return self.batches[0] if self.batches else list(self.active.values())

    @property
    def ahead(self) -> list[HandlerJob]:
        """The requests that were sent to the worker but that it has not begun."""
        return [job for batch in islice(self.batches, 1, None) for job in batch]

    def fail_start(self, why: str) -> bool:
        """Fails a start that is in progress; returns False if there is none."""
        if self.starting is None or self.starting.done():
            return False
        self.starting.set_exception(LoadFailed(why))
        return True


class SupervisorListener(Protocol):
    """Receives the events of a supervisor's workers. All methods are called on the event loop's thread."""

    def received(self, slot: WorkerSlot, header: dict[str, Any], body: bytes) -> None:
        """Called with each message of a worker: its JSON header and its raw bytes."""

    def lost(self, slot: WorkerSlot, why: str) -> None:
        """Called when the process of a ready worker has ended."""

    def became_ready(self, slot: WorkerSlot) -> None:
        """Called when all ranks of a worker have loaded the handler."""

    def unavailable(self, why: str) -> None:
        """Called when no worker is left and the last attempt to start one has failed."""

    def dropped(self) -> None:
        """Called when a removed worker has ended."""


class WorkerSupervisor:
    """Runs the workers of one model. ``order`` returns the ``WorkerOrder`` of a worker number; numbers are reused."""

    def __init__(
        self, name: str, config: HandlerConfig, order: Callable[[int], WorkerOrder], listener: SupervisorListener
    ) -> None:
        self.slots: list[WorkerSlot] = []  # a removed worker stays here until its process has ended
        self.trouble: str | None = None  # the reason why there is no worker; None if there is one
        self.restarts = 0
        self._name = name
        self._config = config
        self._order = order
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._restarting: set[asyncio.Task[None]] = set()
        # Includes processes without a slot; each start drops the processes that have ended.
        self._processes: list[WorkerProcess] = []
        self.ended = False

    @property
    def ready(self) -> list[WorkerSlot]:
        """The workers that have loaded the handler and still run."""
        return [slot for slot in self.slots if slot.ready]

    @property
    def staying(self) -> list[WorkerSlot]:
        """The workers that are not being scaled away, ready or not."""
        return [slot for slot in self.slots if not slot.leaving and not slot.removed]

    async def add(self, count: int) -> None:
        """Starts ``count`` more workers at the same time, and waits until they are ready.

        Raises LoadFailed if a worker cannot be started; the other workers stay. Raises WorkerRemoved if the only
        failures are workers that were removed while they started.
        """
        added = [self._new_slot() for _ in range(count)]
        results = await asyncio.gather(*map(self._start, added), return_exceptions=True)
        failed = {slot: each for slot, each in zip(added, results, strict=True) if isinstance(each, BaseException)}
        for slot in failed:
            self.remove(slot)
        for error in sorted(failed.values(), key=lambda each: isinstance(each, WorkerRemoved)):
            raise error

    def remove(self, slot: WorkerSlot) -> None:
        """Ends a worker for good. The worker must have no requests."""
        slot.removed, slot.ready = True, False
        if slot.worker is not None:
            slot.worker.kill()
        if slot.lost:
            self._drop(slot)

    def _new_slot(self) -> WorkerSlot:
        used = {slot.number for slot in self.slots}
        slot = WorkerSlot(next(number for number in range(len(used) + 1) if number not in used))
        self.slots.append(slot)
        self.slots.sort(key=lambda each: each.number)
        return slot

    def _drop(self, slot: WorkerSlot) -> None:
        if slot in self.slots:
            self.slots.remove(slot)
        slot.gone.set()
        if not self.staying:
            self.trouble = None
        self._listener.dropped()

    def kill(self, slot: WorkerSlot, why: str) -> None:
        """Kills a worker's process; unless the worker is removed, it is restarted."""
        if slot.worker is not None:
            slot.worker.kill(why)

    def end(self) -> None:
        """Ends all workers for good. May be called in any thread."""
        self.ended = True
        for slot in list(self.slots):
            if slot.worker is not None:
                slot.worker.kill()

    def wait(self) -> None:
        """Blocks until no process is left."""
        for process in self._processes:
            process.wait()

    async def _start(self, slot: WorkerSlot) -> None:
        """Starts the worker's process, and waits until all its ranks are ready. Raises LoadFailed."""
        name = f"{self._name} worker {slot.number}"
        removed = WorkerRemoved(f"{name} was scaled away while it started")
        if slot not in self.slots:
            raise removed
        slot.starting = self._loop.create_future()
        slot.starts += 1
        slot.lost = False
        slot.ranks_starting = self._config.ranks
        slot.cancellation = RankCancellation(self._config.ranks) if self._config.stops == "together" else None
        receive, lose = partial(self._received, slot, slot.starts), partial(self._lost, slot, slot.starts)
        try:
            slot.worker = WorkerProcess(name, self._order(slot.number), receive, lose)
            self._processes = [*(each for each in self._processes if each.running), slot.worker]
            if self.ended:  # ``end`` may have been called in another thread meanwhile
                slot.worker.kill()
            await asyncio.wait_for(slot.starting, self._config.startupTimeout)
        except asyncio.TimeoutError:
            await self._end_process(slot, "was not ready in time")
            if slot.removed:
                raise removed from None
            raise LoadFailed(f"{name} was not ready within {self._config.startupTimeout} s (startupTimeout)") from None
        except LoadFailed as error:
            if slot.removed:
                raise removed from None
            await self._end_process(slot, str(error))
            if slot.removed:  # the worker was removed while it started
                raise removed from None
            raise
        except OSError as error:
            slot.lost = True
            raise LoadFailed(f"{name} cannot be started: {error}") from None
        finally:
            slot.starting = None

    async def _end_process(self, slot: WorkerSlot, why: str) -> None:
        """Ends the process and waits for its end, so that its memory and ports are free for the next start."""
        if slot.worker is not None:
            slot.worker.kill(why)
            await in_thread(slot.worker.wait)

    def _received(self, slot: WorkerSlot, start: int, header: dict[str, Any], body: bytes) -> None:
        if start != slot.starts or slot.removed:
            return
        slot.active_at = time.monotonic()
        if header["t"] == "ready":
            slot.ranks_starting -= 1
            if slot.ranks_starting == 0 and slot.starting is not None and not slot.starting.done():
                slot.starting.set_result(None)
                self._become_ready(slot)
        elif header["t"] == "refused":
            slot.fail_start(header["message"])
        else:
            slot.has_answered |= bool(header.get("ended"))
            self._listener.received(slot, header, body)

    def _become_ready(self, slot: WorkerSlot) -> None:
        slot.ready, slot.has_answered = True, False
        slot.ready_at = slot.idle_since = time.monotonic()
        self.trouble = None
        self._listener.became_ready(slot)

    def _lost(self, slot: WorkerSlot, start: int, why: str) -> None:
        if start != slot.starts:
            return
        slot.lost = True
        if slot.removed or (slot.leaving and self.ended):
            self._drop(slot)
        if self.ended:
            slot.gone.set()
        if slot.fail_start(f"{why} before it was ready") or not slot.ready or self.ended:
            return
        logger.error("%s", why)
        slot.ready = False
        if slot.has_answered or time.monotonic() - slot.ready_at > _STABLE_S:
            slot.delay_s = _FIRST_DELAY_S
        self._listener.lost(slot, why)
        if slot.leaving:
            self.remove(slot)
            return
        task = self._loop.create_task(self._start_again(slot))
        self._restarting.add(task)
        task.add_done_callback(self._restarting.discard)

    async def _start_again(self, slot: WorkerSlot) -> None:
        """Starts the worker until it is ready; the delay between attempts doubles."""
        while True:
            await asyncio.sleep(slot.delay_s)
            slot.delay_s = min(slot.delay_s * 2, _MAX_DELAY_S)
            if self.ended or slot.removed:
                return
            try:
                self.restarts += 1
                await self._start(slot)
            except WorkerRemoved:
                return
            except Exception as error:
                logger.error("Model %s: cannot restart worker %d: %s", self._name, slot.number, log_text(error))
                if not self.ready:
                    self.trouble = f"its workers died and cannot be restarted: {error}"
                    self._listener.unavailable(self.trouble)
            else:
                logger.info("Model %s: worker %d is ready again", self._name, slot.number)
                return


def rank_environments(config: HandlerConfig, devices: str | None) -> list[Mapping[str, str]]:
    """Returns, for each rank, the environment variables that torchrun would set; none for a single process.

    ``devices`` is the value of CUDA_VISIBLE_DEVICES for all ranks.
    """
    shared: dict[str, str] = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    count = config.ranks
    if config.parallelType is None or (config.parallelType == "custom" and config.torchrun is None):
        return [shared]
    threads = config.torchrun.omp_number_threads if config.torchrun is not None else 1
    shared |= {
        "MASTER_ADDR": "127.0.0.1",
        # If another process takes the port before the first rank does, the start fails and is tried again.
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(count),
        "TORCHELASTIC_RUN_ID": "mlserver-torch-stream",
        "OMP_NUM_THREADS": str(threads),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)} for rank in range(count)]
