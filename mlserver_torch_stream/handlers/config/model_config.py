"""Reads a handler model's settings, from ``model-config.yaml`` and ``parameters.extra``, into one frozen object.

The server uses the keys that are read here. The handler gets the YAML unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from mlserver_torch_stream.did_you_mean import did_you_mean, nearest_name
from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.settings import typed_values

# Keys that have an effect in TorchServe and none here, each with the reason, which is logged at load.
NOT_HONOURED = {
    "maxRetryTimeoutInSec": "a worker that dies is started again for as long as the model is loaded",
}
_TORCHRUN_NOT_HONOURED = {
    "rdzv-backend",
    "rdzv-conf",
    "rdzv-endpoint",
    "rdzv-id",
    "monitor-interval",
    "node-rank",
    "max-restarts",
    "master-addr",
    "master-port",
    "log-dir",
}
_NEAR = 0.85  # the similarity from which a handler's own key is reported as a likely misspelling of one of ours


class TorchRun(BaseModel):
    """The ranks of a parallel handler, all on this machine."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, populate_by_name=True)

    nnodes: Literal[1] = 1
    nproc_per_node: int = Field(1, alias="nproc-per-node", gt=0)
    omp_number_threads: int = Field(1, alias="OMP_NUMBER_THREADS", gt=0)


class HandlerConfig(BaseModel):
    """The settings of one handler model, with TorchServe's names and units.

    A limit of 0 means "no limit" for the same keys as in TorchServe.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    minWorkers: int = Field(1, ge=0)  # worker processes
    maxWorkers: int = Field(0, ge=0)  # if below minWorkers, as by default, the number is fixed
    scaleUpAfterMSec: int = Field(1000, ge=0)  # how long a request waits, while no worker is free, until one is added
    scaleDownAfterMSec: int = Field(60_000, ge=0)  # how long an idle worker stays
    batchSize: int = Field(1, gt=0)
    maxBatchDelay: int = Field(100, ge=0)  # milliseconds
    responseTimeout: int = Field(120, gt=0)  # seconds in which a busy handler sends nothing
    startupTimeout: int = Field(120, gt=0)  # seconds
    deviceType: Literal["cpu", "gpu"] | None = None
    deviceIds: tuple[int, ...] | None = Field(None, strict=False)
    parallelType: Literal["pp", "tp", "pptp", "custom"] | None = None
    parallelLevel: int = Field(0, ge=0)
    torchrun: TorchRun | None = None
    clientTimeoutInMills: int = Field(0, ge=0)
    jobQueueSize: int = Field(100, ge=0)  # requests that wait; 0 means 100
    useJobTicket: bool = False  # refuse a request if no worker is free
    sequenceMaxIdleMSec: int = Field(0, ge=0)
    sequenceTimeoutMSec: int = Field(0, ge=0)
    maxSequenceJobQueueSize: int = Field(1, gt=0)
    maxNumSequence: int = Field(0, ge=0)  # 0 means batchSize for each worker
    continuousBatching: bool = False
    sequenceBatching: bool = False
    asyncCommunication: bool = False
    useVenv: bool = False  # the archive's requirements need an environment of their own
    # Keys of parameters.extra that a YAML does not have.
    ts: Literal["auto", "shim", "package"] = "auto"
    python: str | None = None  # None means the server's own interpreter
    metrics_config: str | None = None
    service_envelope: str | None = None  # overrides the one in the archive
    handler: str | None = None  # overrides the one in the archive
    blacklist_env_vars: str | None = None  # matches the names of the server's variables that workers do not see
    limit_max_image_pixels: bool = True  # read by TorchServe's own image handlers
    install_py_dep_per_model: bool = False  # pip installs requirements into the unpacked folder
    defaultVersion: Any = None

    @field_validator("blacklist_env_vars")
    @classmethod
    def _is_a_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"is not a regular expression ({error})") from None
        return value

    @model_validator(mode="after")
    def _one_way_of_batching(self) -> HandlerConfig:
        if self.asyncCommunication and (self.continuousBatching or self.sequenceBatching):
            raise ValueError("asyncCommunication cannot be combined with continuousBatching or sequenceBatching")
        if self.ranks > 1 and (self.continuousBatching or self.asyncCommunication):
            raise ValueError("several ranks cannot be combined with continuousBatching or asyncCommunication")
        return self

    @property
    def ranks(self) -> int:
        """The number of processes that this package starts for one worker.

        As in TorchServe, a ``custom`` handler without ``torchrun`` starts its ranks itself, so the number is 1.
        """
        if self.parallelType is None:
            return 1
        if self.torchrun is not None:
            return self.torchrun.nproc_per_node
        return 1 if self.parallelType == "custom" else max(self.parallelLevel, 1)

    @property
    def broadcasts(self) -> bool:
        """True if every rank gets every request; False if only the first rank does."""
        return self.parallelType != "pp"

    @property
    def stops(self) -> Literal["alone", "together", "never"]:
        """How a call is ended early once all its clients have disconnected; with ``never`` the call runs to its end.

        A ``custom`` handler in one process may have started its own ranks, which would wait for the ended call forever.
        """
        if self.ranks == 1:
            return "never" if self.parallelType == "custom" else "alone"
        return "together" if self.broadcasts else "never"

    @property
    def hidden(self) -> re.Pattern[str] | None:
        """The pattern of the names of those environment variables of the server that workers do not see."""
        return re.compile(self.blacklist_env_vars) if self.blacklist_env_vars else None

    @property
    def most_workers(self) -> int:
        """The largest number of workers that the load may start."""
        return max(self.maxWorkers, self.minWorkers)

    @property
    def queue_size(self) -> int:
        """The largest number of requests that may wait."""
        return self.jobQueueSize or HandlerConfig.model_fields["jobQueueSize"].default


_FIELDS = tuple(HandlerConfig.model_fields)
KEYS, OURS = _FIELDS[: _FIELDS.index("ts")], _FIELDS[_FIELDS.index("ts") :]


def read_config(yaml: Mapping[str, Any], overrides: Mapping[str, Any]) -> HandlerConfig:
    """Validates the keys of a model; a key in ``overrides`` replaces the same key in ``yaml``.

    Raises SettingsError, which names the key.
    """
    for key in overrides:
        if key not in _FIELDS:
            raise SettingsError(f"parameters.extra: unknown key {key!r}{did_you_mean(key, _FIELDS)}")
    given = {key: yaml[key] for key in KEYS if yaml.get(key) is not None} | typed_values(overrides, HandlerConfig)
    try:
        return HandlerConfig.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        where = "parameters.extra" if first["loc"] and first["loc"][0] in overrides else "model-config.yaml"
        shown = f", got {first['input']!r}" if place else ""
        name = f"{where}: {place}" if place else where
        raise SettingsError(f"{name}: {first['msg'].removeprefix('Value error, ')}{shown}") from None


def not_honoured(yaml: Mapping[str, Any], config: HandlerConfig) -> Iterator[str]:
    """Yields one line for each key of the YAML that has an effect in TorchServe but not here."""
    for key, reason in NOT_HONOURED.items():
        if key in yaml:
            yield f"{key}: {reason}"
    if 0 < config.maxWorkers < config.minWorkers:
        least = config.minWorkers
        yield f"maxWorkers: {config.maxWorkers} is less than minWorkers, so the model always has {least} workers"
    if not config.most_workers:
        yield "minWorkers: 0: the model has no worker, and answers no request until a worker is added"
    torchrun = yaml.get("torchrun")
    if isinstance(torchrun, Mapping):
        for key in torchrun:
            if key in _TORCHRUN_NOT_HONOURED:
                yield f"torchrun.{key}: not used: all ranks run on this machine and find each other"
    for key in yaml:
        near = nearest_name(str(key), KEYS, _NEAR)
        if key not in KEYS and key not in NOT_HONOURED and near:
            yield f"{key}: not a key of the server, only the handler reads it; did you mean {near}?"
