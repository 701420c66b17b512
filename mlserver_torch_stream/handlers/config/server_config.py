"""Reads the configuration of a TorchServe server: config.properties, its command line and its environment variables.

The configuration is turned into environment variables of MLServer and of this package, a list of archives to serve, and
defaults for the archives' settings.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.handlers.config.properties import (
    DEFAULT_VERSION,
    ELSEWHERE,
    METRICS_CONFIG,
    carried,
    is_true,
    model_keys,
    own_settings,
    read_properties_file,
    whole_number,
    words,
)
from mlserver_torch_stream.handlers.config.store_files import StoredModel, stored_models
from mlserver_torch_stream.handlers.config.worker_settings import find_metrics_config

_BY_VARIABLES = "enable_envvars_config"
_ALLOWED_URLS, _ALLOWED_BY_VARIABLE = "allowed_urls", "use_env_allowed_urls"
# Keys that TorchServe reads from the file only, never from an environment variable.
_FILE_ONLY = words(
    "enable_envvars_config io_ratio metric_time_interval model_snapshot models plugins_path system_metrics_cmd "
    "use_env_allowed_urls use_native_io version vmargs"
)
_TLS = "TLS ends at the ingress, or is switched on by MLSERVER_TORCH_STREAM_TLS_CERT_FILE and …_TLS_KEY_FILE"
_NO_TLS = "enable_grpc_ssl"  # the one key for TLS that is refused unless it is false
REFUSED = words(f"keystore keystore_pass keystore_type certificate_file private_key_file {_NO_TLS}")
HONOURED = words(
    "inference_address metrics_address enable_metrics_api metrics_mode grpc_inference_port grpc_inference_address "
    "max_request_size cors_allowed_origin cors_allowed_methods cors_allowed_headers number_of_gpu decode_input_request "
    "ts_header_key_sequence_id ts_header_key_sequence_start ts_header_key_sequence_end default_response_timeout "
    "default_startup_timeout default_workers_per_model job_queue_size metrics_config service_envelope "
    "limit_max_image_pixels blacklist_env_vars install_py_dep_per_model models model_snapshot load_models model_store "
    "management_address enable_model_api allowed_urls disable_token_authorization enable_envvars_config "
    "use_env_allowed_urls"
)
_READ_BY_MODELS = ("TS_DECODE_INPUT_REQUEST", "TS_METRICS_CONFIG")  # whether or not variables are enabled
_REFERENCE = re.compile(r"\$\$([^$]+)\$\$")
_ADDRESS = re.compile(r"(?P<scheme>https?)://(?P<host>[^:/]+)(?::(?P<port>\d+))?/?", re.IGNORECASE)
_METRICS_ENDPOINT = "MLSERVER_METRICS_ENDPOINT"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LOCAL = "127.0.0.1"
_GRPC_VARIABLE, _GRPC_PORTS = "MLSERVER_GRPC_PORT", (8081, *range(8083, 8087))  # the first unused port is taken
_USUAL_GRPC_PORT = "7070"
_OURS = "MLSERVER_TORCH_STREAM_"
# Settings of the server that suit handlers, streams and a model store.
_FIXED = {
    "MLSERVER_PARALLEL_WORKERS": "0",
    "MLSERVER_GZIP_ENABLED": "false",
    "MLSERVER_DEBUG": "false",
    f"{_OURS}SKIP_FAILED_MODELS": "true",
    "MLSERVER_MODEL_REPOSITORY_IMPLEMENTATION": "mlserver_torch_stream.GuardedModelRepository",  # for keys and TLS
}
_UNNAMED = {*_FIXED, _GRPC_VARIABLE, _VISIBLE}  # set by no key, or computed from the variable itself
_PASSED_ON = {
    "decode_input_request": "TS_DECODE_INPUT_REQUEST",
    "ts_header_key_sequence_id": "TS_REQUEST_SEQUENCE_ID",
    "ts_header_key_sequence_start": "TS_REQUEST_SEQUENCE_START",
    "ts_header_key_sequence_end": "TS_REQUEST_SEQUENCE_END",
}
_CORS = {
    "cors_allowed_origin": "allow_origins",
    "cors_allowed_methods": "allow_methods",
    "cors_allowed_headers": "allow_headers",
}
_TOKENS = (f"{_OURS}MANAGEMENT_TOKEN", f"{_OURS}MANAGEMENT_TOKEN_FILE")
_MANAGEMENT_KEYS = ("management_address", "enable_model_api", _ALLOWED_URLS)
# Keys that have the same name in parameters.extra.
_TEXTS, _FLAGS = ("service_envelope", "blacklist_env_vars"), ("limit_max_image_pixels", "install_py_dep_per_model")


@dataclass(frozen=True, slots=True)
class Address:
    """The host and port on which a server listens."""

    host: str
    port: int


class ServerConfig:
    """TorchServe's configuration: ``properties`` by key, and their ``file``; without a file its defaults apply.

    Every method may raise SettingsError, which names the key.
    """

    def __init__(
        self, properties: Mapping[str, str], file: Path | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.properties = properties
        self._file = file
        self._environ = environ
        self._extra = self._extra_of_all()

    @classmethod
    def read(
        cls, file: Path | None, arguments: Mapping[str, str] | None = None, environ: Mapping[str, str] = os.environ
    ) -> ServerConfig:
        """Reads ``file``, and ``arguments``, the keys from the command line, which override the file.

        Environment variables override both if the file enables them. Raises SettingsError, for example for a key that
        this package cannot honour, such as a keystore.
        """
        given = read_properties_file(file) if file is not None else {}
        found = {key: _resolved(key, value, environ) for key, value in given.items()} | dict(arguments or {})
        if is_true(found.get(_BY_VARIABLES)):
            found |= {key: environ[name] for key, name in _variables(found).items() if name in environ}
        for key in found:
            if key in REFUSED and (key != _NO_TLS or is_true(found[key])):
                raise SettingsError(f"config.properties: {key}: is not implemented: {_TLS}")
        return cls({key: value.strip() for key, value in found.items()}, file, environ)

    def is_true(self, key: str, default: bool = False) -> bool:
        """Whether the boolean ``key`` is true; ``default`` is the value of a key that is not set."""
        return is_true(self.properties.get(key, default))

    def ignored(self) -> Iterator[str]:
        """Yields one line for each key and each of TorchServe's environment variables that has no effect here."""
        for key in self.properties:
            if key not in HONOURED and key not in REFUSED:
                yield f"{key}: ignored: {ELSEWHERE.get(key, 'TorchServe 0.12 does not know it either')}"
        if not self.is_true("disable_token_authorization"):
            yield "token authorization: only the management API needs a token here; the inference API needs none"
        read = _variables(self.properties) if self.is_true(_BY_VARIABLES) else {}
        for key, name in _all_variables().items():
            if name in self._environ and name not in _READ_BY_MODELS and key not in read:
                yield f"{name}: ignored: {_ALLOWED_BY_VARIABLE if key == _ALLOWED_URLS else _BY_VARIABLES} is not true"

    # --- the server ---

    def environment(self, gpus: Callable[[], int]) -> tuple[dict[str, str], list[str]]:
        """Returns the environment variables to set, and lines to show to the user.

        A variable that is set already keeps its value; if MLServer reads it, a line says so. ``gpus`` returns the
        number of visible GPUs.
        """
        properties, environ = self.properties, self._environ
        wanted = {**_FIXED, **self._addresses(), **self._bounds(), **self._cors(), **self._visible(gpus)}
        wanted |= {name: properties[key] for key, name in _PASSED_ON.items() if key in properties}
        lines = [
            f"{name}: {environ[name]} from the environment is used instead of {value}"
            for name, value in wanted.items()
            if name not in _UNNAMED and environ.get(name, value) != value
        ]
        if properties.get("metrics_mode", "").lower() == "prometheus":
            wanted[f"{_OURS}TORCHSERVE_METRIC_NAMES"] = "true"
        host = self._inference.host
        if properties.get("grpc_inference_address", host) != host:
            lines.append(f"grpc_inference_address: ignored: gRPC listens on the host of inference_address, {host}")
        if self._metrics.host != host and _METRICS_ENDPOINT not in wanted:
            lines.append(f"metrics_address: its host is ignored: metrics are on the host of inference_address, {host}")
        why = self._why_unmanaged()
        if why is None:
            wanted |= self._management()
        else:
            lines += [f"{key}: ignored: {why}" for key in _MANAGEMENT_KEYS if key in properties]
        return {name: value for name, value in wanted.items() if name not in environ or name == _VISIBLE}, lines

    @cached_property
    def _inference(self) -> Address:
        return self._address("inference_address", 8080, 80)

    @cached_property
    def _metrics(self) -> Address:
        return self._address("metrics_address", 8082, 8082)

    @cached_property
    def _managed(self) -> Address:
        """The address of the management API; its port is 0 if the configuration names none."""
        named = "management_address" in self.properties
        return self._address("management_address", 8081, 80) if named else Address(_LOCAL, 0)

    def _address(self, key: str, usual: int, without_port: int) -> Address:
        """Parses the address in ``key``. If the key is not set, the port is ``usual``.

        ``without_port`` is the port if the address has none.
        """
        given = self.properties.get(key)
        if given is None:
            return Address(_LOCAL, usual)
        match = _ADDRESS.fullmatch(given)
        place = f"config.properties: {key}"
        if given.startswith("unix:"):
            raise SettingsError(f"{place}: a Unix socket is not implemented: give http://HOST:PORT")
        if match is None:
            raise SettingsError(f"{place}: must be http://HOST:PORT, got {given!r}")
        if match["scheme"].lower() == "https":
            raise SettingsError(f"{place}: https is not implemented: {_TLS}")
        port = int(match["port"] or without_port)
        if not _is_port(port):
            raise SettingsError(f"{place}: must have a port from 1 to 65535, got {given!r}")
        return Address(match["host"], port)

    def _number(self, key: str, rule: str, holds: Callable[[int], bool], usual: str = "") -> int:
        number = whole_number(key, self.properties.get(key, usual))
        if not holds(number):
            raise SettingsError(f"config.properties: {key}: must {rule}, got {number}")
        return number

    def _addresses(self) -> dict[str, str]:
        inference, metrics = self._inference, self._metrics
        found = {
            "MLSERVER_HOST": inference.host,
            "MLSERVER_HTTP_PORT": str(inference.port),
            "MLSERVER_METRICS_PORT": str(metrics.port),
        }
        if not self.is_true("enable_metrics_api", True):
            found[_METRICS_ENDPOINT] = ""
        elif metrics.port == inference.port:
            raise SettingsError("config.properties: metrics_address: must not have the same port as inference_address")
        port = self._number("grpc_inference_port", "be from 1 to 65535", _is_port, _USUAL_GRPC_PORT)
        found[f"{_OURS}GRPC_PORT_TORCHSERVE"] = str(port)
        taken = (inference.port, metrics.port, self._managed.port, port)
        found[_GRPC_VARIABLE] = str(next(port for port in _GRPC_PORTS if port not in taken))
        return found

    def _bounds(self) -> dict[str, str]:
        if "max_request_size" not in self.properties:
            return {}
        size = str(self._number("max_request_size", "be above 0", lambda size: size > 0))
        return {f"{_OURS}MAX_BODY_BYTES": size, "MLSERVER_GRPC_MAX_MESSAGE_LENGTH": size}

    def _cors(self) -> dict[str, str]:
        """MLServer's CORS settings; as in TorchServe, an empty dict if no origin is allowed."""
        if not self.properties.get("cors_allowed_origin"):
            return {}
        lists = {
            name: [word.strip() for word in self.properties.get(key, "").split(",")] for key, name in _CORS.items()
        }
        return {"MLSERVER_CORS_SETTINGS": json.dumps({name: words for name, words in lists.items() if words != [""]})}

    def _visible(self, gpus: Callable[[], int]) -> dict[str, str]:
        """Returns CUDA_VISIBLE_DEVICES with the first ``number_of_gpu`` GPUs; an empty dict if that hides no GPU."""
        if "number_of_gpu" not in self.properties:
            return {}
        most = self._number("number_of_gpu", "not be below 0", lambda number: number >= 0)
        given = self._environ.get(_VISIBLE)
        visible = given.split(",") if given is not None else [str(number) for number in range(gpus())]
        return {_VISIBLE: ",".join(visible[:most])} if len(visible) > most else {}

    def _management(self) -> dict[str, str]:
        properties = self.properties
        wanted = {
            "MANAGEMENT_PORT_TORCHSERVE": str(self._managed.port),
            "MANAGEMENT_ADDRESS": self._managed.host,
            "ENABLE_MODEL_API": str(self.is_true("enable_model_api")).lower(),
            "MODEL_STORE": str(self._store.absolute()),
        }
        if self._file is not None:
            wanted["TORCHSERVE_CONFIG"] = str(self._file.absolute())
        if _ALLOWED_URLS in properties:
            wanted["ALLOWED_URLS"] = properties[_ALLOWED_URLS]
        if self.is_true("disable_token_authorization"):
            wanted["DISABLE_TOKEN_AUTHORIZATION"] = "true"
        return {f"{_OURS}{name}": value for name, value in wanted.items()}

    def _why_unmanaged(self) -> str | None:
        """Returns the reason why the management API is not opened; None if it is opened."""
        if not self._managed.port:
            return "management_address is not set"
        if self._managed.port == self._inference.port:
            return "it has the same port as inference_address"
        if not self.is_true("disable_token_authorization") and not any(name in self._environ for name in _TOKENS):
            return f"set {' or '.join(_TOKENS)}, or disable_token_authorization=true"
        return None

    # --- its models ---

    def model_extra(self, name: str, version: str, yaml: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a model's keys for ``parameters.extra``, without the keys that its YAML sets."""
        return {**self._extra, **carried(self.properties, name, version, yaml)}

    def stored_extra(self, stored: StoredModel, name: str, version: str, yaml: Mapping[str, Any]) -> dict[str, Any]:
        """Like ``model_extra``, for an archive of the model store; a snapshot's settings override its YAML."""
        extra = {**self.model_extra(name, version, yaml), **model_keys(stored.snapshot)}
        own = own_settings(self.properties, name, version)
        if stored.snapshot.get(DEFAULT_VERSION) is True or own.get(DEFAULT_VERSION) is True:
            extra[DEFAULT_VERSION] = True
        return extra

    def stored_models(self, usual: str = "all") -> list[StoredModel]:
        """Returns the archives to load. If the configuration does not set ``load_models``, its value is ``usual``."""
        return stored_models(self._store, {"load_models": usual, **self.properties})

    @property
    def _store(self) -> Path:
        if "model_store" not in self.properties:
            raise SettingsError("model_store is not set: set it with --model-store or in config.properties")
        return Path(self.properties["model_store"])

    def _extra_of_all(self) -> dict[str, Any]:
        properties = self.properties
        extra: dict[str, Any] = {key: properties[key] for key in _TEXTS if properties.get(key)}
        extra |= {key: self.is_true(key) for key in _FLAGS if key in properties}
        if properties.get(METRICS_CONFIG):
            folder = str(self._file.parent if self._file is not None else Path.cwd())
            extra[METRICS_CONFIG] = str(find_metrics_config(properties[METRICS_CONFIG], folder).absolute())
        return extra


def _is_port(number: int) -> bool:
    return 0 < number < 1 << 16


def _variables(properties: Mapping[str, str]) -> dict[str, str]:
    """Returns, for each key, the name of the environment variable that sets it."""
    found = _all_variables()
    if not is_true(properties.get(_ALLOWED_BY_VARIABLE)):
        del found[_ALLOWED_URLS]
    return found


def _all_variables() -> dict[str, str]:
    own = {"token_expiration_min": "TS_TOKEN_EXPIRATION_TIME_MIN"}
    keys = {*HONOURED, *REFUSED, *ELSEWHERE} - _FILE_ONLY
    return {key: own.get(key, f"TS_{key.removeprefix('ts_').upper()}") for key in sorted(keys)}


def _resolved(key: str, value: str, environ: Mapping[str, str]) -> str:
    """Replaces each ``$$NAME$$`` in a value with the environment variable NAME. Raises SettingsError if it is unset."""

    def variable(match: re.Match[str]) -> str:
        if match[1] not in environ:
            raise SettingsError(f"config.properties: {key}: the environment variable {match[1]} is not set")
        return environ[match[1]]

    return _REFERENCE.sub(variable, value)
