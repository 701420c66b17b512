"""Puts several engines with one model behind one ``Engine``, which sends each request to the least loaded replica."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from threading import Lock

import torch

from mlserver_torch_stream.engine.api import Engine, EngineRequest, EngineStats, Mailbox
from mlserver_torch_stream.engine.failures import StepTimeout
from mlserver_torch_stream.engine_settings import EngineSettings
from mlserver_torch_stream.errors import InvalidInput, LoadFailed, NotServing, QueueFull

logger = logging.getLogger(__name__)

OnDeath = Callable[[BaseException], None]

_KEY = "parameters.extra.replicas"
_NEEDS = {"device_map": None, "max_memory": None, "offload_folder": None, "tensor_parallel_size": 1}


def on_devices_of_their_own(settings: EngineSettings) -> list[EngineSettings]:
    """Returns the settings of each replica. Each replica gets its own GPU; on CPUs the replicas share the cores.

    Raises LoadFailed if there are too few GPUs.
    """
    for key, needed in _NEEDS.items():
        if (value := getattr(settings, key)) != needed:
            raise LoadFailed(f"{_KEY}: {settings.replicas} cannot be combined with {key}: {value!r}")
    if not torch.cuda.is_available():
        return [settings] * settings.replicas
    if settings.replicas > torch.cuda.device_count():
        raise LoadFailed(
            f"{_KEY}: {settings.replicas} GPUs are needed, but this machine has {torch.cuda.device_count()}"
        )
    return [settings.model_copy(update={"device_map": number}) for number in range(settings.replicas)]


class ReplicatedEngine:
    """An ``Engine`` over ``replicas``.

    The engine is alive while one replica is alive. Its stats are the sums over all replicas.
    """

    def __init__(self, replicas: Sequence[Engine]) -> None:
        self._replicas = tuple(replicas)
        # The number of requests that each replica got, so that idle replicas take turns.
        self._taken = [0] * len(self._replicas)
        self.info = min(replicas, key=lambda replica: replica.info.max_model_len).info

    @property
    def alive(self) -> bool:
        return any(replica.alive for replica in self._replicas)

    @property
    def trouble(self) -> str | None:
        """The troubles of all replicas; None while at least one replica has none.

        On CPUs every replica is in trouble while one replica's step hangs, because that step occupies the cores.
        """
        return _of_all([replica.trouble for replica in self._replicas])

    @property
    def overdue(self) -> str | None:
        return _of_all([replica.overdue for replica in self._replicas])

    def submit(self, requests: Sequence[EngineRequest]) -> Mailbox:
        """Submits the requests to the least loaded replica that is alive and accepts them.

        If one replica refuses the requests, the next replica may accept them: if other models use some devices, the
        replicas' caches can differ in size.
        """
        refusal: NotServing | QueueFull | InvalidInput | None = None
        for number in self._by_load():
            try:
                stream = self._replicas[number].submit(requests)
            except (QueueFull, NotServing, InvalidInput) as error:
                refusal = refusal or error
                continue
            self._taken[number] += 1
            return stream
        raise refusal or NotServing("the engine is not running")

    def _by_load(self) -> list[int]:
        """Returns the replicas that are alive, the least loaded first.

        If all replicas are dead, returns all of them, because their errors say why.
        """
        numbers = [number for number, replica in enumerate(self._replicas) if replica.alive]
        numbers = numbers or list(range(len(self._replicas)))
        return sorted(numbers, key=self._rank)

    def _rank(self, number: int) -> tuple[bool, int, int]:
        replica = self._replicas[number]
        return replica.overdue is not None, replica.load, self._taken[number]

    @property
    def load(self) -> int:
        return sum(replica.load for replica in self._replicas)

    def stats(self) -> EngineStats:
        parts = [replica.stats() for replica in self._replicas]
        return EngineStats(
            **{each.name: sum(getattr(part, each.name) for part in parts) for each in fields(EngineStats)}
        )

    def drain(self, why: str) -> None:
        for replica in self._replicas:
            replica.drain(why)

    def abort_all(self, why: str) -> None:
        for replica in self._replicas:
            replica.abort_all(why)

    def shutdown(self) -> None:
        for replica in self._replicas:
            replica.shutdown()


def _of_all(troubles: Sequence[str | None]) -> str | None:
    return None if None in troubles else troubles[0]


class Deaths:
    """Reports the death of the last of ``count`` replicas; until then, another replica serves the requests.

    A thread that hangs in a step is reported at once, because only the end of the process can end the thread, and on
    CPUs the other replicas wait for its cores.
    """

    def __init__(self, count: int, on_death: OnDeath | None) -> None:
        self._left = count
        self._on_death = on_death
        self._lock = Lock()

    def died(self, error: BaseException) -> None:
        """Counts a death. Any thread may call it."""
        with self._lock:
            self._left -= 1
            left = self._left
        if left > 0 and not isinstance(error, StepTimeout):
            logger.error("A replica died (%s): %d are left", error, left)
        elif self._on_death is not None:
            self._on_death(error)
