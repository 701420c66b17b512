"""The servers of these tests: one process each, shared by the tests; a test that ends a server starts its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reliability import reciter
from tests.reliability.usage import CENSUS, PYTHON_PATH
from tests.server.harness import Model, Server, serve

QUIET = {"debug": False, "parallel_workers": 0, "gzip_enabled": False}
STEP_S = 0.01  # how long a decode step of ``slow`` takes at least
MAX_BODY = 65_536  # bytes that ``plain`` takes


@pytest.fixture(scope="session")
def recite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose answer is known beforehand."""
    folder = tmp_path_factory.mktemp("models") / "reciter"
    reciter.save(folder)
    return folder


@pytest.fixture(scope="session")
def plain(recite: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``recite``; ``small``, whose answers are always short; ``tiny``, a random model; and the census."""
    models = [
        Model("recite", str(recite), version="v1"),
        Model(
            "small", str(recite), extra={"max_model_len": 64, "max_num_seqs": 8, "default_sampling": {"max_tokens": 3}}
        ),
        Model("tiny", str(tiny_model)),
        CENSUS,
    ]
    environment = {"PYTHONPATH": PYTHON_PATH, "MLSERVER_TORCH_STREAM_MAX_BODY_BYTES": str(MAX_BODY)}
    folder = tmp_path_factory.mktemp("plain") / "models"
    with serve(folder, models, settings=QUIET, environment=environment, triton=True) as running:
        yield running


@pytest.fixture(scope="session")
def slow(recite: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Decode steps are slow; ``narrow`` has one row and one place in its queue, ``busy`` four rows and eight places."""
    models = [
        Model("recite", str(recite)),
        Model("narrow", str(recite), extra={"max_queued_requests": 1, "max_num_seqs": 1}),
        Model("busy", str(recite), extra={"max_queued_requests": 8, "max_num_seqs": 4}),
        CENSUS,
    ]
    environment = {
        "PYTHONPATH": PYTHON_PATH,
        "MLSERVER_TORCH_STREAM_FAULTS": f"decode:1:slow={STEP_S}",
        "MLSERVER_TORCH_STREAM_STALLED_READER_TIMEOUT": "1",
    }
    folder = tmp_path_factory.mktemp("slow") / "models"
    with serve(folder, models, settings=QUIET, environment=environment, triton=True) as running:
        yield running
