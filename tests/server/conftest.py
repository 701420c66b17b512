"""The servers of these tests: one process each, shared by all tests.

A test that disturbs a server for others starts its own.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub

from tests.server import foreign
from tests.server.harness import HOST, MODULE_SPELLING, PACKAGE_SPELLING, Model, Server, serve
from tests.server.otlp import Collector, collector

QUIET = {"debug": False, "parallel_workers": 0, "gzip_enabled": False}
# A decode step of the tiny model takes 0.2 ms: no client could read or leave while an answer of it is generated.
PACED = "decode:1:slow=0.02"
SMALL_BODY = 20_000  # bytes that ``slow`` takes
TRITON_MESSAGE_BYTES = 100_000  # that ``triton`` takes
FOREIGN = Model("foreign", None, implementation="foreign.Foreign", version="v1")
_TRIAL = "tests.server.trial_spelling.TrialRuntime"
_SHIM = {"ts": "shim"}
_HANDLER = "def handle(data, context):\n    return None if data is None else ['x']\n"


def with_foreign(folder: Path) -> dict[str, str]:
    """Returns the environment in which MLServer finds ``foreign``."""
    shutil.copy(foreign.__file__, folder / "foreign.py")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``tiny`` has a version; ``other`` has none, and names our class by its module; ``narrow`` has a queue of one
    place.

    ``tight`` has two rows, and memory for little more than one. ``foreign`` is a model with MLServer's own interface.
    """
    folder = tmp_path_factory.mktemp("server")
    models = [
        FOREIGN,
        Model("tiny", str(tiny_model), version="v1"),
        Model("other", str(tiny_model), implementation=MODULE_SPELLING),
        Model("narrow", str(tiny_model), extra={"max_queued_requests": 1, "max_num_seqs": 1}),
        Model("tight", str(tiny_model), extra={"max_num_seqs": 2, "kv_cache_memory": "1MiB"}),
    ]
    with serve(folder / "models", models, settings=QUIET, environment=with_foreign(folder)) as running:
        yield running


@pytest.fixture(scope="session")
def stub(server: Server) -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.grpc_target) as channel:
        yield GRPCInferenceServiceStub(channel)


@pytest.fixture(scope="session")
def slow(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Every step is slowed down and every limit is small; ``narrow`` has one row and one place in its queue."""
    environment = {
        "MLSERVER_TORCH_STREAM_FAULTS": "prefill:1:slow=0.3,decode:1:slow=0.02",
        "MLSERVER_TORCH_STREAM_SSE_PING_INTERVAL": "0.05",
        "MLSERVER_TORCH_STREAM_STALLED_READER_TIMEOUT": "0.5",
        "MLSERVER_TORCH_STREAM_MAX_BODY_BYTES": str(SMALL_BODY),
    }
    models = [
        Model("tiny", str(tiny_model)),
        Model("narrow", str(tiny_model), extra={"max_queued_requests": 1, "max_num_seqs": 1}),
    ]
    with serve(tmp_path_factory.mktemp("slow") / "models", models, settings=QUIET, environment=environment) as running:
        yield running


@pytest.fixture(scope="session")
def impatient(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Waits 2 s for the next piece of a prompt, and decodes so slowly that clients can leave in mid-answer."""
    environment = {
        "MLSERVER_TORCH_STREAM_FAULTS": PACED,
        "MLSERVER_TORCH_STREAM_PIECE_TIMEOUT": "2",
    }
    folder = tmp_path_factory.mktemp("impatient") / "models"
    with serve(folder, [Model("tiny", str(tiny_model))], settings=QUIET, environment=environment) as running:
        yield running


@pytest.fixture(scope="session")
def triton(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Has Triton's port, small messages, and decode steps so slow that a client can leave in the middle of an answer.

    ``foreign`` is a model of another runtime.
    """
    folder = tmp_path_factory.mktemp("triton")
    shutil.copy(foreign.__file__, folder / "foreign.py")
    models = [
        Model("tiny", str(tiny_model), version="v1"),
        Model("other", str(tiny_model)),
        Model("narrow", str(tiny_model), extra={"max_queued_requests": 1, "max_num_seqs": 1}),
        Model("foreign", None, "foreign.Foreign"),
    ]
    environment = {
        "MLSERVER_TORCH_STREAM_FAULTS": PACED,
        "MLSERVER_TORCH_STREAM_STALLED_READER_TIMEOUT": "1",
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    settings = {**QUIET, "grpc_max_message_length": TRITON_MESSAGE_BYTES}
    with serve(folder / "models", models, settings=settings, environment=environment, triton=True) as running:
        yield running


@pytest.fixture(scope="session")
def failing(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Each engine's 40th decode step fails, long after the first token was sent, and then its third prefill.

    ``trial`` and ``broken`` have their own endpoints; ``handler`` is a TorchServe handler.
    """
    folder = tmp_path_factory.mktemp("failing")
    (folder / "handler.py").write_text(_HANDLER)
    models = [Model(name, str(tiny_model), extra={"max_model_len": 1000 + i}) for i, name in enumerate("abc")]
    models += [
        Model("trial", str(tiny_model), implementation=_TRIAL),
        Model("broken", str(tiny_model), implementation=_TRIAL, extra={"max_model_len": 1003}),
        Model("handler", f"{folder / 'handler.py'}:handle", "mlserver_torch_stream.TorchServeRuntime", extra=_SHIM),
    ]
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "MLSERVER_TORCH_STREAM_FAULTS": "decode:1:slow=0.01,decode:40:raise,prefill:3:raise",
    }
    with serve(folder / "models", models, settings=QUIET, environment=environment) as running:
        yield running


@pytest.fixture(scope="session")
def bare_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An empty folder and MLServer's own defaults (one worker, gzip), as on KServe: the environment names the model.

    Its log is JSON, with prompts and answers. Its decode steps are slowed down.
    """
    folder = tmp_path_factory.mktemp("bare")
    environment = {
        **with_foreign(folder),
        "MLSERVER_TORCH_STREAM_FAULTS": PACED,
        "MLSERVER_MODEL_IMPLEMENTATION": PACKAGE_SPELLING,
        "MLSERVER_MODEL_NAME": "tiny",
        "MLSERVER_MODEL_URI": str(tiny_model),
        "MLSERVER_MODEL_EXTRA": json.dumps({"max_model_len": 256}),
        "MLSERVER_PARALLEL_WORKERS": "1",
        "MLSERVER_GZIP_ENABLED": "true",
        "MLSERVER_USE_STRUCTURED_LOGGING": "true",
        "MLSERVER_TORCH_STREAM_LOG_PROMPTS": "true",
    }
    with serve(folder / "models", [], environment=environment, forked=False) as running:
        yield running


@pytest.fixture(scope="session")
def spans() -> Iterator[Collector]:
    """The collector to which ``observed`` sends its spans."""
    with collector() as collecting:
        yield collecting


@pytest.fixture(scope="session")
def observed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, spans: Collector) -> Iterator[Server]:
    """Everything by which a server can be observed is on, except prompts in the log; ``tiny`` and ``narrow`` as above.

    Decode steps are slowed down, so that a client can leave in the middle of an answer.
    """
    models = [
        Model("tiny", str(tiny_model), version="v1"),
        Model("narrow", str(tiny_model), extra={"max_queued_requests": 1, "max_num_seqs": 1}),
    ]
    environment = {
        "MLSERVER_TORCH_STREAM_VLLM_METRIC_NAMES": "true",
        "MLSERVER_TORCH_STREAM_MAX_BODY_BYTES": "65536",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "MLSERVER_TORCH_STREAM_FAULTS": "decode:1:slow=0.005",
    }
    settings = {**QUIET, "tracing_server": f"{HOST}:{spans.port}"}
    folder = tmp_path_factory.mktemp("observed") / "models"
    with serve(folder, models, settings=settings, environment=environment, triton=True) as running:
        yield running
