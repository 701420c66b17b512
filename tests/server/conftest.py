"""The servers of this room: one process each, shared by all its tests.

Knows no test; a test that disturbs a server for others starts its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub

from tests.server.harness import MODULE_SPELLING, Model, Server, serve

QUIET = {"debug": False, "parallel_workers": 0, "gzip_enabled": False}


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``tiny`` has a version, ``other`` none and the other spelling of our class, ``narrow`` a queue of one."""
    models = [
        Model("tiny", str(tiny_model), version="v1"),
        Model("other", str(tiny_model), implementation=MODULE_SPELLING),
        Model("narrow", str(tiny_model), extra={"max_queue": 1, "max_batch_rows": 1}),
    ]
    with serve(tmp_path_factory.mktemp("server") / "models", models, settings=QUIET) as running:
        yield running


@pytest.fixture(scope="session")
def stub(server: Server) -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.grpc_target) as channel:
        yield GRPCInferenceServiceStub(channel)
