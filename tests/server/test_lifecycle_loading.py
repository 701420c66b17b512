"""A server whose model is still loading: not ready on any endpoint, refuses with the right codes, and can be stopped.

The load is slow because the model's own code, which ``trust_remote_code`` runs, waits for a file.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import pytest
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub

from tests import plain_http
from tests.server import foreign, v2
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, exit_code, get_ready, serve
from tests.server.inflight import grpc_refusal, grpc_unary, rest_unary
from tests.server.scrape import on_rest_port
from tests.waiting import wait_until

_CODE = """
import os, time, torch
from transformers import LlamaForCausalLM

open({arrived!r}, "w").close()
some = torch.ones(300, 300)
while not os.path.exists({gate!r}):
    {wait}


class GatedLlama(LlamaForCausalLM):
    pass
"""
_IDLE = "time.sleep(0.02)"
_BUSY = "some @ some"
_BUILDING = "torch.nn.Linear(2, 2)"
_NEVER_READY = """
from mlserver import MLModel


class NeverReady(MLModel):
    async def load(self):
        return False
"""


@contextmanager
def loading_server(
    tiny_model: Path, tmp_path: Path, drain_delay: float = 0.0, wait: str = _IDLE
) -> Iterator[tuple[Server, Path]]:
    """A server that loads ``gated`` until the file ``gate`` is created, beside two models that are not ours."""
    gate, arrived = tmp_path / "gate", tmp_path / "arrived"
    folder = tmp_path / "gated"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "gated.GatedLlama"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "gated.py").write_text(_CODE.format(gate=str(gate), arrived=str(arrived), wait=wait))
    models = [
        Model("gated", str(folder), version="v1", extra={"trust_remote_code": True}),
        Model("foreign", None, implementation="foreign.Foreign"),
        Model("never", None, implementation="never.NeverReady"),
    ]
    python_path = tmp_path / "python"
    python_path.mkdir()
    shutil.copy(foreign.__file__, python_path / "foreign.py")
    (python_path / "never.py").write_text(_NEVER_READY)
    environment = {
        "PYTHONPATH": f"{python_path}:{Path(__file__).parents[2]}",
        "HF_MODULES_CACHE": str(tmp_path / "hf"),
        "MLSERVER_TORCH_STREAM_DRAIN_DELAY": str(drain_delay),
    }
    with serve(tmp_path / "models", models, settings=QUIET, environment=environment, ready=False) as server:
        end = time.monotonic() + 120
        while not arrived.exists():
            assert server.process.poll() is None and time.monotonic() < end, server.log
            time.sleep(0.05)
        try:
            yield server, gate
        finally:
            gate.touch()


@pytest.mark.long
def test_a_loading_model_is_not_ready_and_others_are_untouched(tiny_model: Path, tmp_path: Path) -> None:
    with loading_server(tiny_model, tmp_path) as (server, gate), grpc.insecure_channel(server.grpc_target) as channel:
        stub = GRPCInferenceServiceStub(channel)

        def server_ready() -> bool:
            return bool(stub.ServerReady(pb.ServerReadyRequest()).ready)

        def model_ready(name: str) -> bool:
            return bool(stub.ModelReady(pb.ModelReadyRequest(name=name)).ready)

        for path in ("health", "models/gated", "models/gated/versions/v1"):
            answer = get_ready(server, path)
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert "gated" in answer.json()["error"] and "loading" in answer.json()["error"]
        assert not server_ready() and not model_ready("gated")
        assert plain_http.get(f"{server.url}/v2/health/live", timeout=5).status_code == 200

        refused = rest_unary(server, "gated")
        assert refused.code == 503 and refused.headers["retry-after"]
        body = v2.rest_body("Hello")
        for endpoint in ("infer_stream", "generate", "generate_stream"):
            assert plain_http.post(f"{server.url}/v2/models/gated/{endpoint}", json=body, timeout=5).status_code == 503
        assert grpc_unary(stub, "gated").code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert grpc_refusal(stub, "gated") is grpc.StatusCode.UNAVAILABLE
        refusals = on_rest_port(server).by("status_code", "torch_stream_request_errors_total", model="gated")
        assert refusals == {"503": 4 + 2}, "all endpoints count them"

        assert get_ready(server, "models/foreign").status_code == 200 and model_ready("foreign")
        assert plain_http.post(f"{server.url}/v2/models/foreign/infer", json=body, timeout=5).status_code == 200
        assert get_ready(server, "models/never").status_code == 400, "MLServer's own answer"
        assert plain_http.post(f"{server.url}/v2/models/never/infer", json=body, timeout=5).status_code == 400
        assert get_ready(server, "models/unknown").status_code == 404

        gate.touch()
        wait_until(lambda: get_ready(server, "models/gated").status_code == 200)
        assert model_ready("gated") and rest_unary(server, "gated", max_tokens=1).code == 200
        assert get_ready(server).status_code == 400, "only the foreign model is not ready: MLServer's own answer"


@pytest.mark.long
def test_an_unload_ends_a_load_and_the_model_can_be_loaded_again(tiny_model: Path, tmp_path: Path) -> None:
    """Without the unload, the load would build modules until the file is created."""
    with loading_server(tiny_model, tmp_path, wait=_BUILDING) as (server, gate):
        repository = f"{server.url}/v2/repository/models/gated"
        assert plain_http.post(f"{repository}/unload", timeout=30).status_code == 200, server.log
        assert get_ready(server, "models/gated").status_code == 404
        cancelled = "Model 'gated': its load was cancelled, because it is being unloaded"
        wait_until(lambda: cancelled in server.log, "the line about the load")
        wait_until(lambda: get_ready(server, "models/foreign").status_code == 200)
        gate.touch()
        assert plain_http.post(f"{repository}/load", timeout=60).status_code == 200
        assert rest_unary(server, "gated", max_tokens=1).code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wait", "loads_meanwhile", "sent"), [(_BUSY, False, signal.SIGQUIT), (_IDLE, True, signal.SIGTERM)]
)
def test_a_server_that_is_stopped_while_it_loads_is_never_ready(
    tiny_model: Path, tmp_path: Path, wait: str, loads_meanwhile: bool, sent: signal.Signals
) -> None:
    """The load computes until the process ends, or waits and then ends."""
    with loading_server(tiny_model, tmp_path, drain_delay=1.5, wait=wait) as (server, gate):
        server.process.send_signal(sent)
        if loads_meanwhile:
            gate.touch()
        answers: list[int] = []
        with suppress(httpx.NetworkError, httpx.RemoteProtocolError):  # it has closed its listeners
            while True:
                answers += [get_ready(server).status_code, get_ready(server, "models/gated").status_code]
                answers.append(rest_unary(server, "gated").code)
        assert len(answers) >= 3
        assert set(answers) == {503}
        assert exit_code(server) == 0, server.log
