"""Parses a request that registers a model, and turns it into the model's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlserver_torch_stream.did_you_mean import did_you_mean
from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.handlers.config.archive import model_settings, read_named
from mlserver_torch_stream.handlers.config.model_config import read_config
from mlserver_torch_stream.handlers.config.properties import is_true
from mlserver_torch_stream.handlers.config.server_config import ServerConfig
from mlserver_torch_stream.handlers.config.store_files import ManagementRefusal, bad_request

# The request's parameter -> the key in the model's settings.
_KEYS = {
    "batch_size": "batchSize",
    "max_batch_delay": "maxBatchDelay",
    "response_timeout": "responseTimeout",
    "startup_timeout": "startupTimeout",
}
_OTHERS = ("url", "model_name", "handler", "runtime", "initial_workers", "synchronous", "s3_sse_kms")
_NO_WORKERS = {"minWorkers": 0, "maxWorkers": 0}
_RUNTIMES = ("python", "python3")


@dataclass(frozen=True, slots=True)
class Registration:
    """A request that registers a model. ``extra`` holds the keys of ``parameters.extra`` that the request sets."""

    url: str
    name: str | None = None
    initial_workers: int | None = None  # None: the server's configuration decides
    synchronous: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)


def read_registration(given: Mapping[str, Any]) -> Registration:
    """Parses the parameters of a request, from its query or its JSON body.

    Raises ManagementRefusal for an unknown parameter, a wrong value or a missing ``url``.
    """
    for key in given:
        if key not in (*_KEYS, *_OTHERS):
            raise bad_request(f"unknown parameter {key!r}{did_you_mean(str(key), (*_KEYS, *_OTHERS))}")
    if given.get("url") is None:
        raise bad_request("Parameter url is required.")
    if is_true(given.get("s3_sse_kms")):
        raise bad_request("s3_sse_kms: encrypted archives are not implemented: decrypt them into the model store")
    runtime = given.get("runtime")
    if runtime is not None and str(runtime).lower() not in _RUNTIMES:
        raise bad_request(f"Invalid Runtime: {runtime}")
    extra: dict[str, Any] = {key: whole_number(given, name) for name, key in _KEYS.items() if name in given}
    if given.get("handler"):
        extra["handler"] = str(given["handler"])
    workers = whole_number(given, "initial_workers") if "initial_workers" in given else None
    if workers is not None and workers < 0:
        raise bad_request(f"initial_workers: must not be below 0, got {workers}")
    name = None if given.get("model_name") in (None, "") else str(given["model_name"])
    return Registration(str(given["url"]), name, workers, is_true(given.get("synchronous", True)), extra)


def registered_settings(asked: Registration, path: Path, server: ServerConfig) -> dict[str, Any]:
    """Returns the content of the model's ``model-settings.json``. Reads only the manifest and the YAML of the archive
    at ``path``. Raises ManagementRefusal.

    As in TorchServe, ``minWorkers`` and ``maxWorkers`` override ``initial_workers`` if the YAML has both of them, and a
    model gets no worker if neither the YAML nor the request sets the number. All other parameters of the request
    override the YAML, and the YAML overrides the server's defaults.
    """
    try:
        name, version, yaml = read_named(path, asked.name)
        extra = {**_NO_WORKERS, **server.model_extra(name, version, yaml), **asked.extra}
        extra |= _workers(yaml, asked.initial_workers)
        read_config(yaml, extra)
    except SettingsError as error:
        raise bad_request(str(error)) from None
    except LoadFailed as error:
        raise ManagementRefusal(400, "InvalidModelException", str(error)) from None
    return model_settings(name, str(path), version, extra)


def _workers(yaml: Mapping[str, Any], asked: int | None) -> dict[str, int]:
    """Returns minWorkers and maxWorkers; an empty dict if neither the YAML nor the request sets them."""
    least, most = yaml.get("minWorkers") or 0, yaml.get("maxWorkers") or 0
    if 0 < least <= most:
        return {"minWorkers": least, "maxWorkers": most}
    return {} if asked is None else {"minWorkers": asked, "maxWorkers": asked}


def whole_number(given: Mapping[str, Any], key: str) -> int:
    """Parses the whole number in a request's parameter. Raises ManagementRefusal, which names the parameter."""
    try:
        return int(str(given[key]))
    except ValueError:
        raise bad_request(f"{key}: must be a whole number, got {given[key]!r}") from None
