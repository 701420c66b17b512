"""The servers of this room: one process each, shared by all its tests.

Knows no test; a test that disturbs a server for others starts its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub

from tests.server.harness import HOST, MODULE_SPELLING, Model, Server, serve
from tests.server.otlp import Collector, collector

QUIET = {"debug": False, "parallel_workers": 0, "gzip_enabled": False}
SMALL_BODY = 20_000  # bytes that ``slow`` takes


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``tiny`` has a version, ``other`` none and the other spelling of our class, ``narrow`` a queue of one.

    ``tight`` has two rows, and memory for little more than one.
    """
    models = [
        Model("tiny", str(tiny_model), version="v1"),
        Model("other", str(tiny_model), implementation=MODULE_SPELLING),
        Model("narrow", str(tiny_model), extra={"max_queue": 1, "max_num_seqs": 1}),
        Model("tight", str(tiny_model), extra={"max_num_seqs": 2, "kv_cache_memory": "1MiB"}),
    ]
    with serve(tmp_path_factory.mktemp("server") / "models", models, settings=QUIET) as running:
        yield running


@pytest.fixture(scope="session")
def stub(server: Server) -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.grpc_target) as channel:
        yield GRPCInferenceServiceStub(channel)


@pytest.fixture(scope="session")
def slow(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Every step takes its time and every bound is small; ``narrow`` has one row and one place in its queue."""
    environment = {
        "MLSERVER_TORCH_STREAM_FAULTS": "prefill:1:slow=0.3,decode:1:slow=0.02",
        "MLSERVER_TORCH_STREAM_KEEP_ALIVE": "0.05",
        "MLSERVER_TORCH_STREAM_STALLED_READER_TIMEOUT": "0.5",
        "MLSERVER_TORCH_STREAM_MAX_BODY_BYTES": str(SMALL_BODY),
    }
    models = [
        Model("tiny", str(tiny_model)),
        Model("narrow", str(tiny_model), extra={"max_queue": 1, "max_num_seqs": 1}),
    ]
    with serve(tmp_path_factory.mktemp("slow") / "models", models, settings=QUIET, environment=environment) as running:
        yield running


@pytest.fixture(scope="session")
def impatient(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Waits 2 s for the next piece of a prompt, and decodes so slowly that a client can leave in the middle."""
    environment = {
        "MLSERVER_TORCH_STREAM_FAULTS": "decode:1:slow=0.02",
        "MLSERVER_TORCH_STREAM_PIECE_TIMEOUT": "2",
    }
    folder = tmp_path_factory.mktemp("impatient") / "models"
    with serve(folder, [Model("tiny", str(tiny_model))], settings=QUIET, environment=environment) as running:
        yield running


@pytest.fixture(scope="session")
def spans() -> Iterator[Collector]:
    """Where ``observed`` sends its spans."""
    with collector() as collecting:
        yield collecting


@pytest.fixture(scope="session")
def observed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, spans: Collector) -> Iterator[Server]:
    """All that can be noticed of a server is on, but for prompts in the log; ``tiny`` and ``narrow`` as above."""
    models = [
        Model("tiny", str(tiny_model), version="v1"),
        Model("narrow", str(tiny_model), extra={"max_queue": 1, "max_num_seqs": 1}),
    ]
    environment = {
        "MLSERVER_TORCH_STREAM_VLLM_METRIC_NAMES": "true",
        "MLSERVER_TORCH_STREAM_MAX_BODY_BYTES": "65536",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    settings = {**QUIET, "tracing_server": f"{HOST}:{spans.port}"}
    folder = tmp_path_factory.mktemp("observed") / "models"
    with serve(folder, models, settings=settings, environment=environment) as running:
        yield running
