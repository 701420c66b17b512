"""The server that these tests share, unless they disturb it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.batches.api import Api
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, serve

MAX_BYTES = 200_000  # of a file
# Every step takes its time, so that a test can act while rows are answered.
SLOW = {"MLSERVER_TORCH_STREAM_FAULTS": "prefill:1:slow=0.02,decode:1:slow=0.02"}


def serve_batches(
    folder: Path, models: list[Model], store: Path | str, environment: dict[str, str] | None = None, ready: bool = True
) -> AbstractContextManager[Server]:
    """Starts a server whose files and batches are kept in ``store``."""
    kept = {
        "MLSERVER_TORCH_STREAM_BATCH_STORE": str(store),
        "MLSERVER_TORCH_STREAM_BATCH_MAX_FILE_BYTES": str(MAX_BYTES),
        "MLSERVER_TORCH_STREAM_LOG_REQUESTS": "false",
        "MLSERVER_TORCH_STREAM_PIECE_TIMEOUT": "3",
        "MLSERVER_TORCH_STREAM_STALLED_READER_TIMEOUT": "3",
    }
    return serve(folder, models, settings=QUIET, environment={**kept, **(environment or {})}, ready=ready, triton=True)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batch-store")


@pytest.fixture(scope="session")
def batch_server(tiny_model: Path, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``tiny``, ``other`` and ``chunked`` are the same model; ``chunked`` prefills its prompts in many steps."""
    models = [
        Model("tiny", str(tiny_model), extra={"max_num_seqs": 4}),
        Model("other", str(tiny_model)),
        Model("chunked", str(tiny_model), extra={"chunked_prefill_size": 8, "prefix_cache_memory": 0}),
    ]
    with serve_batches(tmp_path_factory.mktemp("batches") / "models", models, store, SLOW) as running:
        yield running


@pytest.fixture
def api(batch_server: Server) -> Iterator[Api]:
    with Api(batch_server.url) as asking:
        yield asking
