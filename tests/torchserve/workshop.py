"""Handlers in a test's own folder, run by real workers, without MLServer.

Every wait has a limit; everything that was started has ended at the end of its ``async with``.
"""

from __future__ import annotations

import asyncio
import json
import textwrap
import zipfile
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mlserver_torch_stream.handlers.config.archive import open_archive
from mlserver_torch_stream.handlers.config.model_config import read_config
from mlserver_torch_stream.handlers.config.worker_settings import find_worker_files
from mlserver_torch_stream.handlers.pool.handler_metrics import HandlerMetrics
from mlserver_torch_stream.handlers.pool.handler_request import HandlerRequest, PieceStream, RequestPart
from mlserver_torch_stream.handlers.pool.worker_pool import WorkerPool
from mlserver_torch_stream.handlers.runtime.build import worker_order

T = TypeVar("T")
TIMEOUT_S = 120.0

# Three times "hello", then "hello world ": what TorchServe's documentation shows.
HELLO = """
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    for _ in range(3):
        send_intermediate_predict_response(["hello"] * len(data), context.request_ids, "ok", 200, context)
    return ["hello world "] * len(data)
"""
# "count 3" sends "0", "1", "2" and returns "end"; "raise" raises; a batch steps together, and members drop out.
COUNTER = """
import time
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    texts = [row["body"].decode() for row in data]
    wanted = [int(text.split()[1]) if text.startswith("count") else 0 for text in texts]
    for step in range(max(wanted)):
        left = {i: str(step) for i, count in enumerate(wanted) if step < count}
        send_intermediate_predict_response(left, context.request_ids, "ok", 200, context)
        time.sleep(0.005)
    if "raise" in texts:
        raise ValueError("asked to raise")
    return ["end"] * len(data)
"""


def write_handler(folder: Path, source: str, config: Mapping[str, Any] | None = None, name: str = "handler") -> str:
    """Writes a bare handler with its ``model-config.yaml``, and returns its uri."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(source))
    if config:
        (folder / "model-config.yaml").write_text(yaml.safe_dump(dict(config)))
    return str(path)


def write_mar(path: Path, files: Mapping[str, str], model: Mapping[str, Any] | None = None) -> str:
    """Writes a ``.mar``, with a manifest unless ``model`` is None, and returns its path."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, textwrap.dedent(text))
        if model is not None:
            archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
    return str(path)


def without_torchserve(folder: Path) -> dict[str, str]:
    """Returns variables that hide torchserve's package from handlers, as it imports torch in each worker."""
    (folder / "ts.py").touch()
    return {"PYTHONPATH": str(folder)}


@asynccontextmanager
async def running(
    uri: str,
    which: str = "shim",
    workers: Mapping[str, str] | None = None,
    *,
    metrics: HandlerMetrics | None = None,
    limits: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> AsyncIterator[WorkerPool]:
    """Yields the started workers of a handler. ``which`` is the ``ts`` that it imports, ``workers`` are their other
    settings.

    ``limits`` are those of the ``WorkerPool``.
    """
    archive = open_archive(uri, None)
    try:
        config = read_config(archive.yaml, {"ts": which, **(workers or {}), **overrides})
        settings = find_worker_files(config, None)
        order = partial(worker_order, "model", archive, config, settings)
        pool = WorkerPool("model", config, order, metrics or HandlerMetrics(), **limits or {})
        await pool.start()
        try:
            yield pool
        finally:
            await asyncio.to_thread(pool.shutdown)
    finally:
        archive.close()


def request(text: str = "", request_id: str = "request", **more: Any) -> HandlerRequest:
    return HandlerRequest(request_id, [RequestPart("body", "", text.encode())], **more)


async def texts(job: PieceStream) -> list[str]:
    """Returns all pieces. Raises the error with which the job ends."""
    return [piece.value.decode() async for piece in job]


async def ask(pool: WorkerPool, text: str = "", request_id: str = "request", **more: Any) -> list[str]:
    return await texts(pool.submit(request(text, request_id, **more)))


async def outcome(job: PieceStream) -> list[str] | Exception:
    """Returns all pieces, or the error with which the job ended."""
    try:
        return await texts(job)
    except Exception as error:
        return error


def run(scenario: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(scenario, TIMEOUT_S)

    return asyncio.run(bounded())


async def until(condition: Any, seconds: float = 30.0) -> None:
    """Waits until the condition is true."""
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < end, "not in time"
        await asyncio.sleep(0.01)
