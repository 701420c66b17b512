"""Starts a server over vLLM itself."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.engine.real_vllm import PYTHON, SMALL, UNLIKELY_S
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, get_ready, serve

_NAME = "tiny"  # as in the requests of ``openai``


@contextmanager
def vllm_server(
    folder: Path, model: Path, extra: dict[str, Any] | None = None, *, triton: bool = False, **environment: str
) -> Iterator[Server]:
    """Serves ``model`` under the name ``tiny``. ``folder`` needs a short name; with a long one, the server would put
    the worker's folder elsewhere.
    """
    given = {**SMALL, "vllm": {"enforce_eager": True, "max_num_seqs": 8}, "vllm_python": os.environ[PYTHON]}
    variables = {"TMPDIR": str(folder), "MLSERVER_TORCH_STREAM_DRAIN_GRACE": str(UNLIKELY_S), **environment}
    models = [Model(_NAME, str(model), extra={**given, **(extra or {})})]
    with serve(folder / "models", models, settings=QUIET, environment=variables, ready=False, triton=triton) as server:
        end = time.monotonic() + UNLIKELY_S
        while not _ready(server):
            assert server.process.poll() is None and time.monotonic() < end, server.log
            time.sleep(0.5)
        yield server


def _ready(server: Server) -> bool:
    try:
        return get_ready(server, f"models/{_NAME}").status_code == 200
    except httpx.TransportError:  # not listening yet
        return False
