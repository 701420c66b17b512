"""Finds the files that a model's workers need: the interpreter, the requirements and the metrics' definitions.

Only the section ``model_metrics`` of ``metrics.yaml`` is read. The section ``ts_metrics`` describes TorchServe's own
metrics, which MLServer and the node exporter export under other names. Requirements are installed only if the model's
settings ask for it.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.handlers.config.model_config import HandlerConfig
from mlserver_torch_stream.model_source import find_path

MODEL_METRICS = "model_metrics"
_TYPES = ("counter", "gauge", "histogram")
_USUAL = ["ModelName", "Level"]
# The ``model_metrics`` of the metrics.yaml that TorchServe's package contains.
DEFAULT: Mapping[str, Any] = {
    MODEL_METRICS: {
        "gauge": [{"name": name, "unit": "ms", "dimensions": _USUAL} for name in ("HandlerTime", "PredictionTime")]
    }
}


def read_metrics_config(given: str, folder: str | None, key: str) -> Mapping[str, Any]:
    """Returns the content of the metrics file ``given``. The path is relative to ``folder``, the folder of the
    settings.

    Raises SettingsError, which names ``key``, the setting that has the path.
    """
    path = find_path(given, folder)
    if path is None or not path.is_file():
        raise SettingsError(f"{key}: no such file: {given}")
    try:
        return {MODEL_METRICS: dict(_checked(yaml.safe_load(path.read_text(encoding="utf-8"))))}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise SettingsError(f"{key}: {path}: {error}") from None


def find_metrics_config(given: str, folder: str) -> Path:
    """Returns the path of the file that ``metrics_config`` in config.properties names. Raises SettingsError."""
    read_metrics_config(given, folder, "config.properties: metrics_config")
    found = find_path(given, folder)
    assert found is not None
    return found


def _checked(document: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields each type of metric with its metrics. Raises ValueError, which says what is wrong in the document."""
    section = document.get(MODEL_METRICS) if isinstance(document, dict) else None
    if not section or not isinstance(section, dict):
        raise ValueError(f"has no {MODEL_METRICS}, which must map types to lists of metrics")
    for kind, metrics in section.items():
        if kind not in _TYPES:
            raise ValueError(f"{MODEL_METRICS}.{kind}: the type of a metric must be one of {', '.join(_TYPES)}")
        if not isinstance(metrics, list):
            raise ValueError(f"{MODEL_METRICS}.{kind}: must be a list of metrics")
        yield kind, [_metric(f"{MODEL_METRICS}.{kind}[{index}]", metric) for index, metric in enumerate(metrics)]


def _metric(place: str, metric: Any) -> dict[str, Any]:
    if not isinstance(metric, dict):
        raise ValueError(f"{place}: must have name, unit and dimensions")
    for key, kind in (("name", str), ("unit", str), ("dimensions", list)):
        if not isinstance(metric.get(key), kind):
            raise ValueError(f"{place}.{key}: must be a {kind.__name__}, got {metric.get(key)!r}")
    if not all(isinstance(each, str) for each in metric["dimensions"]):
        raise ValueError(f"{place}.dimensions: must be a list of names, got {metric['dimensions']!r}")
    return {key: metric[key] for key in ("name", "unit", "dimensions")}


OLDEST = (3, 8)
_OF_OUR_PYTHON = ("PYTHONHOME", "PYTHONPATH", "__PYVENV_LAUNCHER__")  # they lead an interpreter to its packages
_PRINT_VERSION = "import sys; print(*sys.version_info[:2])"
_MAX_PROBE_S = 60.0


def find_interpreter(given: str, folder: str | None) -> str:
    """Returns the absolute path of a Python interpreter, after it has run and printed its version.

    A relative path is looked up in ``folder``, the settings' folder, first, and then in the working directory. Raises
    SettingsError.
    """
    key = "parameters.extra.python"
    candidates = [Path(given).expanduser().absolute()]
    if folder is not None:
        candidates.insert(0, Path(folder, given).absolute())
    # Links are not resolved: Python finds its virtual environment by the link's folder.
    path = next((str(each) for each in candidates if each.is_file()), None)
    if path is None:
        raise SettingsError(f"{key}: no such interpreter: {given}")
    try:
        run = subprocess.run(
            [path, "-c", _PRINT_VERSION], capture_output=True, env=environment_of(path), timeout=_MAX_PROBE_S, text=True
        )
        version = tuple(map(int, run.stdout.split()))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise SettingsError(f"{key}: {path} cannot be run as a Python interpreter: {error}") from None
    if run.returncode or version < OLDEST:
        problem = run.stderr.strip()[-500:] or f"it is Python {'.'.join(map(str, version))}"
        raise SettingsError(f"{key}: {path}: handlers need Python {OLDEST[0]}.{OLDEST[1]} or later: {problem}")
    return path


def environment_of(python: str | None) -> dict[str, str]:
    """Returns the environment variables that a worker inherits from the server.

    If ``python`` names another interpreter, variables that configure the server's own interpreter are left out.
    """
    left_out = _OF_OUR_PYTHON if python is not None else ()
    return {key: value for key, value in os.environ.items() if key not in left_out}


def not_installed(requirements: str, uri: str, uses_venv: bool) -> str:
    """Returns a line that says how to install an archive's requirements into an environment for its workers."""
    line = (
        f"{requirements} is not installed by the server: if the handler needs it, {_how_to_install(uri, requirements)}"
    )
    if not uses_venv:
        return line
    return f"useVenv: {line}; or set parameters.extra.useVenv to false for the server's own environment"


def _how_to_install(uri: str, requirements: str) -> str:
    """Returns the commands that install the requirements into a new virtual environment."""
    path = uri.removeprefix("file://")
    folder, unpack = path, ""
    if not Path(path).is_dir():
        module = "tarfile" if path.endswith((".tar.gz", ".tgz")) else "zipfile"
        folder, unpack = "unpacked", f"python3 -m {module} -e {shlex.quote(path)} unpacked && "
    # torch is added, because requirements seldom name it: TorchServe's environments see the server's torch.
    install = f"venv/bin/pip install torch -r {shlex.quote(os.path.join(folder, requirements))}"
    return f"run `python3 -m venv venv && {unpack}{install}` and set parameters.extra.python to its venv/bin/python"


_ENV_METRICS = "TS_METRICS_CONFIG"  # TorchServe reads it if enable_envvars_config is true


@dataclass(frozen=True)
class WorkerFiles:
    """The files of a model's workers: the interpreter ``python``, which is None for the server's own, and ``metrics``,
    the content of a ``metrics.yaml``.
    """

    python: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=lambda: DEFAULT)


def find_worker_files(config: HandlerConfig, folder: str | None) -> WorkerFiles:
    """Finds the files that ``config`` names; ``folder`` is the folder of model-settings.json. Raises SettingsError."""
    metrics, key = config.metrics_config, "parameters.extra.metrics_config"
    if not metrics:
        metrics, key = os.environ.get(_ENV_METRICS), _ENV_METRICS
    return WorkerFiles(
        find_interpreter(config.python, folder) if config.python else None,
        read_metrics_config(metrics, folder, key) if metrics else DEFAULT,
    )


logger = logging.getLogger(__name__)
_MAX_INSTALL_S = 1800.0
_SHOWN = 1000  # characters of pip's output that an error shows


def install_requirements(python: str | None, folder: Path, requirements: str) -> None:
    """Runs pip as TorchServe does, with ``python``, or with the server's own interpreter. Raises LoadFailed."""
    if not (folder / requirements).is_file():
        raise LoadFailed(f"the archive has no {requirements}, which its requirementsFile names")
    command = [python or sys.executable, "-m", "pip", "install", "-U", "-t", str(folder), "-r", requirements]
    logger.info("Installing %s: %s", requirements, " ".join(command))
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment_of(python),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_MAX_INSTALL_S,
        )
    except subprocess.TimeoutExpired:
        raise LoadFailed(f"installing {requirements} took longer than {_MAX_INSTALL_S:.0f} s") from None
    if done.returncode:
        said = done.stdout.decode("utf-8", "replace").strip()[-_SHOWN:]
        raise LoadFailed(f"installing {requirements} failed with status {done.returncode}: {said}")
