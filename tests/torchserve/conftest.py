"""Fixtures for tests of the parts that run handlers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlserver_torch_stream.handlers as torchserve
from mlserver_torch_stream.protocol.v2_names import sequence_header
from tests.server.harness import Server
from tests.torchserve.predicting import serve_predictions

_SHIM = Path(torchserve.__file__).parent / "shim"


@pytest.fixture(scope="session")
def predictions_server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    with serve_predictions(tmp_path_factory.mktemp("predictions"), tiny_model) as running:
        yield running


@pytest.fixture(autouse=True)
def sequence_variables() -> Iterator[None]:
    """Lets a test set the variables that name the headers of sequences, which a server reads once."""
    sequence_header.cache_clear()
    yield
    sequence_header.cache_clear()


@pytest.fixture
def shim(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes ``import ts`` import the shim, for this test only."""
    kept = {name: module for name, module in sys.modules.items() if _uses_ts(name)}
    for name in kept:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(_SHIM))
    yield
    for name in [name for name in sys.modules if _uses_ts(name)]:
        del sys.modules[name]
    sys.modules.update(kept)


def _uses_ts(name: str) -> bool:
    return name.partition(".")[0] == "ts" or name.startswith("mlserver_torch_stream.handlers.worker.")
