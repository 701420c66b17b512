"""Packs an example by ``torch-model-archiver``, as its page says, with random weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tests.torchserve.beside.examples import Example
from tests.torchserve.beside.store import Stored

_WEIGHTS = Path(__file__).parent / "weights.py"
_TIMEOUT_S = 300


def pack(examples: Sequence[Example], checkout: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """Writes each example's archive into the folder's ``model-store``. Its weights are in ``<name>/made``."""
    store = folder / "model-store"
    store.mkdir(parents=True)
    orders = [
        [str(folder / each.name / "made"), kind, *(_path(argument, checkout, folder) for argument in arguments)]
        for each in examples
        for kind, *arguments in each.weights
    ]
    _run([sys.executable, str(_WEIGHTS), json.dumps(orders)], folder, environment)
    for each in examples:
        _archive(each, checkout, store, folder / each.name, environment)


def _archive(example: Example, checkout: Path, store: Path, folder: Path, environment: Mapping[str, str]) -> None:
    made = folder / "made"
    config = folder / "model-config.yaml"
    config.write_text(yaml.safe_dump(_config(example, checkout)))
    parts = {
        "--model-name": example.name,
        "--version": "1.0",
        "--handler": _path(example.handler, checkout, made),
        "--model-file": _path(example.model_file, checkout, made),
        "--serialized-file": _path(example.serialized, checkout, made),
        "--extra-files": ",".join(_path(each, checkout, made) for each in example.extra),
        "--config-file": str(config),
        "--export-path": str(store),
    }
    options = [word for name, value in parts.items() if value for word in (name, value)]
    _run([sys.executable, "-m", "model_archiver.model_packaging", *options], folder, environment)
    (store / f"{example.name}.mar").rename(store / Stored(example.name, "").file)


def _config(example: Example, checkout: Path) -> dict[str, object]:
    """Returns the example's own settings with the changes made here."""
    own = yaml.safe_load((checkout / example.config_file).read_text()) if example.config_file else {}
    return {"minWorkers": 1, "maxWorkers": 1, "responseTimeout": 300, **own, **example.config}


def _path(named: str, checkout: Path, made: Path) -> str:
    """A name without a folder is that of a built-in handler."""
    if named.startswith("made/"):
        return str(made / named.removeprefix("made/"))
    return str(checkout / named) if "/" in named else named


def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        command, cwd=folder, env=dict(environment), capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}"
