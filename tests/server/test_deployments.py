"""Other ways to start MLServer: from the environment alone, with workers, and with errors in the settings."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import grpc
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub as Stub

from mlserver_torch_stream import client
from tests import plain_http
from tests.server import v2
from tests.server.conftest import FOREIGN
from tests.server.harness import Server


def test_the_environment_alone_serves_a_model_and_its_settings(bare_server: Server) -> None:
    body = v2.rest_body("Hello", max_tokens=8)
    assert v2.rest_unary(bare_server.url, "/v2/models/tiny/infer", body).outputs["num_output_tokens"] == [8]
    too_long = plain_http.post(f"{bare_server.url}/v2/models/tiny/infer", json=v2.rest_body("fox " * 300), timeout=60)
    assert too_long.status_code == 422 and "256" in too_long.json()["error"]


def test_a_server_with_workers_still_streams(bare_server: Server) -> None:
    rest = v2.rest_stream(bare_server.url, "/v2/models/tiny/infer_stream", v2.rest_body("Hello fox", max_tokens=15))
    assert len(rest) > 2
    with grpc.insecure_channel(bare_server.grpc_target) as channel:
        request = v2.grpc_request("tiny", "Hello fox", max_tokens=15)
        streamed = [v2.grpc_reply(each) for each in Stub(channel).ModelStreamInfer(iter([request]), timeout=60)]
    assert len(streamed) > 2
    assert v2.joined(streamed) == v2.joined(rest)


def test_another_runtime_is_loaded_into_a_worker_and_answers(bare_server: Server) -> None:
    folder = bare_server.log_path.with_suffix("") / FOREIGN.name
    folder.mkdir()
    (folder / "model-settings.json").write_text(json.dumps(FOREIGN.settings()))
    try:
        loaded = plain_http.post(f"{bare_server.url}/v2/repository/models/{FOREIGN.name}/load", timeout=60)
        assert loaded.status_code == 200, loaded.text
        body = {"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["word"]}]}
        reply = plain_http.post(f"{bare_server.url}/v2/models/{FOREIGN.name}/infer", json=body, timeout=60)
        assert reply.status_code == 200 and reply.json()["outputs"][0]["data"] == ["word"], reply.text
    finally:
        plain_http.post(f"{bare_server.url}/v2/repository/models/{FOREIGN.name}/unload", timeout=60)
        shutil.rmtree(folder)


def test_settings_that_hinder_streams_are_said_once(bare_server: Server) -> None:
    assert bare_server.log.count("inference workers cannot stream") == 1
    assert bare_server.log.count("gzip_enabled is true") == 1


def test_a_server_without_them_is_not_warned(server: Server) -> None:
    assert "cannot stream" not in server.log and "gzip_enabled" not in server.log


def test_loading_ends_in_one_line_that_says_what_is_where(server: Server) -> None:
    (line,) = [line for line in server.log.splitlines() if "Model 'tiny':" in line]
    assert "cpu" in line and "KV cache" in line


def test_reloading_and_unloading_by_the_repository_api(server: Server) -> None:
    def repository(action: str) -> int:
        return plain_http.post(f"{server.url}/v2/repository/models/other/{action}", timeout=120).status_code

    def answer() -> str:
        return "".join(map(str, client.stream(server.url, "other", "Hello fox", max_tokens=12)))

    before = answer()
    assert repository("load") == 200
    assert answer() == before
    assert repository("unload") == 200
    assert "running_sequences" not in server.counters("other")
    assert (
        plain_http.post(f"{server.url}/v2/models/other/infer", json=v2.rest_body("Hello"), timeout=60).status_code
        == 404
    )
    assert repository("load") == 200
    assert answer() == before


def test_the_terminal_chat_talks_to_a_real_server(server: Server) -> None:
    command = [sys.executable, "-m", "mlserver_torch_stream.cli", "chat", "--url", server.url, "--model", "tiny"]
    chat = subprocess.run([*command, "--max-tokens", "12"], input=b"Hi\n", capture_output=True, timeout=60)
    messages = [{"role": "user", "content": "Hi"}]
    answer = "".join(map(str, client.stream(server.url, "tiny", messages=messages, max_tokens=12)))
    assert (chat.returncode, chat.stdout.decode(), chat.stderr) == (0, f"{answer}\n", b"")
