"""The workers of one model: started, told what to load, started again when they die.

Knows nothing of which request goes where: it is told whom to tell what a worker says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.free_port import free_port
from mlserver_torch_stream.torchserve.config import HandlerConfig
from mlserver_torch_stream.torchserve.handler_request import HandlerJob
from mlserver_torch_stream.torchserve.rank_cancel import RankCancellation
from mlserver_torch_stream.torchserve.worker_process import WorkerEnded, WorkerOrder, WorkerProcess

logger = logging.getLogger(__name__)
_FIRST_DELAY_S, _MOST_DELAY_S = 0.1, 30.0
_SOUND_S = 60.0  # a worker that has lived as long, or answered, was not wrong from the start


class WorkerSlot:
    """One worker's place: the process that is in it now, if any, and what it works on."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.worker: WorkerProcess | None = None
        self.turn = 0  # how many have been in it: what is heard of earlier ones means nothing any more
        self.ready = False
        self.active: dict[str, HandlerJob] = {}
        self.together: RankCancellation | None = None  # where its ranks may stop
        self.idle_since = 0.0
        self.watch: asyncio.TimerHandle | None = None
        self.signed = 0.0  # when anything was heard of it
        self.delay_s = _FIRST_DELAY_S  # before it is started again
        self.born = 0.0
        self.proven = False  # this process has answered


class SupervisorListener(Protocol):
    """All of it is called on the event loop."""

    def heard(self, place: WorkerSlot, header: dict[str, Any], body: bytes) -> None: ...

    def lost(self, place: WorkerSlot, why: str) -> None:
        """The worker that was ready in this place is no more."""

    def came(self, place: WorkerSlot) -> None:
        """A worker is ready."""

    def hopeless(self, why: str) -> None:
        """No worker is left, and the last attempt to start one has failed."""


class WorkerSupervisor:
    """``order`` makes what the worker with a number loads."""

    def __init__(
        self, name: str, config: HandlerConfig, order: Callable[[int], WorkerOrder], manager: SupervisorListener
    ) -> None:
        self.places = [WorkerSlot(number) for number in range(config.minWorkers)]
        self.trouble: str | None = None  # why there is no worker
        self.restarts = 0
        self._name = name
        self._config = config
        self._order = order
        self._manager = manager
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._starting: dict[int, int] = {}  # ranks that are not ready yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = False

    @property
    def ready(self) -> list[WorkerSlot]:
        return [place for place in self.places if place.ready]

    async def start(self) -> None:
        """All at once. Raises LoadFailed if any cannot be started; then none is left."""
        results = await asyncio.gather(*(self._start(place) for place in self.places), return_exceptions=True)
        failed = next((each for each in results if isinstance(each, BaseException)), None)
        if failed is not None:
            self.end()
            raise failed

    def kill(self, place: WorkerSlot, why: str) -> None:
        if place.worker is not None:
            place.worker.kill(why)

    def end(self) -> None:
        """For good. From any thread."""
        self._over = True
        for place in self.places:
            if place.worker is not None:
                place.worker.kill()

    def wait(self) -> None:
        """Until no process is left. Blocks."""
        for place in self.places:
            if place.worker is not None:
                place.worker.wait()

    async def _start(self, place: WorkerSlot) -> None:
        """Raises LoadFailed."""
        done = self._waiting[place.number] = self._loop.create_future()
        name = f"{self._name} worker {place.number}"
        self._starting[place.number] = self._config.ranks
        place.turn += 1
        place.together = RankCancellation(self._config.ranks) if self._config.stops == "together" else None
        try:
            place.worker = WorkerProcess(
                name,
                self._order(place.number),
                self._post,
                partial(self._heard, place, place.turn),
                partial(self._lost, place, place.turn),
            )
            if self._over:  # since the last look: ``end`` may be called in any thread
                place.worker.kill()
            await asyncio.wait_for(done, self._config.startupTimeout)
        except asyncio.TimeoutError:
            self.kill(place, "was not ready in time")
            raise LoadFailed(f"{name} was not ready within {self._config.startupTimeout} s (startupTimeout)") from None
        except LoadFailed as error:
            self.kill(place, str(error))
            raise
        except OSError as error:
            raise LoadFailed(f"{name} cannot be started: {error}") from None
        finally:
            self._waiting.pop(place.number, None)

    def _heard(self, place: WorkerSlot, turn: int, header: dict[str, Any], body: bytes) -> None:
        if turn != place.turn:
            return
        place.signed = time.monotonic()
        kind = header["t"]
        waiting = self._waiting.get(place.number)
        if kind == "ready":
            self._starting[place.number] -= 1
            if self._starting[place.number] == 0 and waiting is not None and not waiting.done():
                waiting.set_result(None)
                self._is_ready(place)
        elif kind == "refused":
            if waiting is not None and not waiting.done():
                waiting.set_exception(LoadFailed(header["message"]))
        else:
            place.proven |= bool(header.get("ended"))
            self._manager.heard(place, header, body)

    def _is_ready(self, place: WorkerSlot) -> None:
        place.ready, place.proven = True, False
        place.born = place.idle_since = time.monotonic()
        self.trouble = None
        self._manager.came(place)

    def _lost(self, place: WorkerSlot, turn: int, ended: WorkerEnded) -> None:
        if turn != place.turn:
            return
        waiting = self._waiting.get(place.number)
        if waiting is not None and not waiting.done():
            waiting.set_exception(LoadFailed(f"{ended} before it was ready"))
            return
        if not place.ready or self._over:
            return
        logger.error("%s", ended)
        place.ready = False
        if place.proven or time.monotonic() - place.born > _SOUND_S:
            place.delay_s = _FIRST_DELAY_S
        self._manager.lost(place, str(ended))
        task = self._loop.create_task(self._start_again(place))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_again(self, place: WorkerSlot) -> None:
        """Until it is ready, with more and more time between the attempts."""
        while True:
            await asyncio.sleep(place.delay_s)
            place.delay_s = min(place.delay_s * 2, _MOST_DELAY_S)
            if self._over:
                return
            try:
                self.restarts += 1
                await self._start(place)
            except Exception as error:
                logger.error("Model %s: cannot start worker %d again: %s", self._name, place.number, error)
                if not self.ready:
                    self.trouble = f"its workers died, and cannot be started again: {error}"
                    self._manager.hopeless(self.trouble)
            else:
                logger.info("Model %s: worker %d is there again", self._name, place.number)
                return

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to be told
            self._loop.call_soon_threadsafe(callback, *args)


def rank_environments(config: HandlerConfig, devices: str | None) -> list[Mapping[str, str]]:
    """What torchrun sets for the ranks of one machine; nothing for a single process. ``devices``: visible GPUs."""
    shared: dict[str, str] = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    count = config.ranks
    if config.parallelType is None or (config.parallelType == "custom" and config.torchrun is None):
        return [shared]
    threads = config.torchrun.omp_number_threads if config.torchrun is not None else 1
    shared |= {
        "MASTER_ADDR": "127.0.0.1",
        # If another process takes it before the first rank does, the start fails and is tried again.
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
