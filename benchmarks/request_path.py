"""Counts the modules that one warm request enters, and lists the classes whose objects hold its prompt on the way.

``python -m benchmarks.request_path`` serves the embedded model and a TorchServe handler in this process. It sends each
kind of request twice, and infers one object of a cloud run twice with each model; the second time is profiled in every
thread. A module counts if one of its functions runs before the model's first forward, or before the handler is called;
``in all`` counts until the reply has ended. A shape is a class of ours whose new object holds the prompt itself, its
text or its token ids, in a field or in a list or mapping there. The bytes of the request, and what MLServer or our
parser makes of them, are shapes too.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from mlserver.cli.serve import load_settings
from mlserver.server import MLServer

from benchmarks.answers import Ask, Recording
from benchmarks.endpoints import HOST, GrpcEndpoint
from benchmarks.process import free_ports
from benchmarks.servers import EMBEDDED, answering, write_mlserver_folder
from mlserver_torch_stream.cloud.endpoint import ServerEndpoint
from mlserver_torch_stream.cloud.requests import ObjectRequest, RowRequest
from mlserver_torch_stream.cloud.run import CloudRun, stream

_PACKAGE = Path(__file__).parent.parent / "mlserver_torch_stream"
_PROMPT = "quokka harbour violin"  # words by which the prompt is recognised in every shape of the request
_HANDLER = """
def handle(data, context):
    bodies = [row["body"] for row in data or ()]
    return [body if isinstance(body, str) else bytes(body).decode() for body in bodies] or None
"""
_RUNTIME = "mlserver_torch_stream.{}Runtime"
_MODELS: dict[str, dict[str, Any]] = {
    "smollm2": {"implementation": _RUNTIME.format("TorchStream"), "parameters": {"uri": EMBEDDED}},
    "echo": {"implementation": _RUNTIME.format("TorchServe"), "parameters": {"uri": "./handler.py"}},
}
_READY_S = 300.0
_FORWARDS = ("native_forward", "model_forward", "worker_rank")  # the modules that compute, or send to a handler
_PAUSE_S = 0.5  # in which the clean-up after a request ends


class PathRecorder:
    """Records the modules and the shapes of everything that runs in any thread while ``recording`` is true."""

    def __init__(self) -> None:
        self.recording = False
        self.modules: dict[str, None] = {}
        self.before_forward: int | None = None  # the count of modules when the first forward began
        self.shapes: dict[str, None] = {}
        self._ids: set[tuple[int, ...]] = set()

    def begin(self) -> None:
        self.modules.clear()
        self.shapes.clear()
        self.before_forward = None
        self.recording = True

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.recording or event not in ("call", "return"):
            return
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith("mlserver_torch_stream"):
            return
        self.modules[module] = None
        if self.before_forward is None and module.rpartition(".")[2] in _FORWARDS:
            self.before_forward = len(self.modules)
        if event == "return" and frame.f_code.co_name == "__init__" and "self" in frame.f_locals:
            self._note_shape(frame.f_locals["self"])
        elif event == "return" and frame.f_code.co_name in ("encode", "_encode_all"):
            self._note_ids(argument)

    def _note_ids(self, ids: Any) -> None:
        for sequence in ids if isinstance(ids, list) and ids and not isinstance(ids[0], int) else [ids]:
            if isinstance(sequence, Sequence) and sequence and isinstance(sequence[0], int):
                self._ids.add(tuple(sequence))

    def _note_shape(self, made: Any) -> None:
        if any(self._holds_prompt(value) for value in _fields(made)):
            self.shapes[type(made).__qualname__] = None

    def _holds_prompt(self, value: Any, depth: int = 3) -> bool:
        if isinstance(value, (str, bytes)):
            return _PROMPT in (value if isinstance(value, str) else value.decode("utf-8", "replace"))
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
            return tuple(value) in self._ids
        if depth and isinstance(value, dict):
            return any(self._holds_prompt(inner, depth - 1) for inner in value.values())
        if depth and isinstance(value, (list, tuple)):
            return any(self._holds_prompt(inner, depth - 1) for inner in value)
        return False


def _fields(made: Any) -> Iterator[Any]:
    yield from getattr(made, "__dict__", {}).values()
    for kind in type(made).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = [slots] if isinstance(slots, str) else slots
        yield from (getattr(made, name) for name in names if hasattr(made, name))


async def _serve_while(folder: Path, work: Callable[[str, str], None]) -> None:
    """Runs MLServer on this thread, as its signals need, and ``work`` with the ports' addresses on another."""
    http_port, grpc_port, metrics_port = free_ports(3)
    more = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
    repository = "mlserver_torch_stream.GuardedModelRepository"
    write_mlserver_folder(folder, _MODELS, {**more, "model_repository_implementation": repository})
    (folder / "echo" / "handler.py").write_text(_HANDLER)
    settings, models = await load_settings(str(folder))
    server = MLServer(settings)
    serving = asyncio.create_task(server.start(models))
    try:
        await asyncio.to_thread(work, f"http://{HOST}:{http_port}", f"{HOST}:{grpc_port}")
    finally:
        await server.stop()
        await serving


def _post(url: str, body: Any) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
    response = httpx.post(url, content=content, headers={"Content-Type": kind}, timeout=60.0)
    response.raise_for_status()


def _stream_over_grpc(address: str) -> None:
    endpoint = GrpcEndpoint(int(address.rpartition(":")[2]), "smollm2")

    async def stream() -> None:
        await endpoint.send(endpoint.request(Ask(_PROMPT, 0, 4)), Recording())
        await endpoint.close()

    asyncio.run(stream())


def _infer_object(folder: str, endpoint: ServerEndpoint) -> None:
    """Runs a cloud run over the one object in the folder, whose batches go to this server."""

    async def infer() -> None:
        async for result in stream(CloudRun(folder), endpoint):
            assert result.outcome.failure is None, result.outcome.failure

    asyncio.run(infer())


def _requests(url: str, address: str, folder: str) -> dict[str, Callable[[], None]]:
    chat = {"model": "smollm2", "messages": [{"role": "user", "content": _PROMPT}], "max_tokens": 4, "stream": True}
    flat = {"text_input": _PROMPT, "max_tokens": 4}
    prompts = ServerEndpoint(url, "smollm2", rows=RowRequest({"max_tokens": 4}), batches=True)
    objects = ServerEndpoint(url, "echo", objects=ObjectRequest(), batches=True)
    return {
        "flat generate over REST": lambda: _post(f"{url}/v2/models/smollm2/generate", flat),
        "chat streamed over /v1": lambda: _post(f"{url}/v1/chat/completions", chat),
        "V2 stream over gRPC": lambda: _stream_over_grpc(address),
        "/predictions to a handler": lambda: _post(f"{url}/predictions/echo", _PROMPT.encode()),
        "an object of a cloud run": lambda: _infer_object(folder, prompts),
        "an object of a cloud run to a handler": lambda: _infer_object(folder, objects),
    }


def _report(url: str, address: str, recorder: PathRecorder) -> None:
    end = time.monotonic() + _READY_S
    while answering(int(url.rpartition(":")[2]), "/v2/health/ready") != 200:
        if time.monotonic() > end:
            raise SystemExit(f"error: the server was not ready within {_READY_S:.0f} s")
        time.sleep(0.2)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "prompt.txt").write_text(_PROMPT)
        for name, ask in _requests(url, address, folder).items():
            ask()
            time.sleep(_PAUSE_S)
            recorder.begin()
            ask()
            time.sleep(_PAUSE_S)
            recorder.recording = False
            modules = [module.removeprefix("mlserver_torch_stream.") for module in recorder.modules]
            count, shapes = recorder.before_forward, ["bytes", "JSON object", *recorder.shapes]
            print(f"{name}: {count} modules ({len(modules)} in all), {len(shapes)} shapes")
            print(f"  modules: {', '.join(modules)}\n  shapes: {', '.join(shapes)}", flush=True)


def main() -> None:
    recorder = PathRecorder()
    threading.setprofile(recorder.profile)
    sys.setprofile(recorder.profile)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_serve_while(Path(folder), partial(_report, recorder=recorder)))


if __name__ == "__main__":
    main()
