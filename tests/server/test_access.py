"""Keys and TLS on every port of a server: each endpoint of its table is called, and its file of keys is changed."""

from __future__ import annotations

import asyncio
import io
import json
import os
import queue
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import httpx
import pytest
from mlserver.grpc import dataplane_pb2, model_repository_pb2
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub

from mlserver_torch_stream import client
from mlserver_torch_stream.cli.serve import Announcement
from mlserver_torch_stream.server.grpc.triton import TritonServicer
from mlserver_torch_stream.server.host import ServerHost
from mlserver_torch_stream.server.page.page_routes import page_files, page_paths
from mlserver_torch_stream.server.state import ServerState
from tests import markdown, plain_http
from tests.certificates import Authority
from tests.server import foreign, openai, route_lister, triton_wire, v2
from tests.server.conftest import QUIET
from tests.server.harness import HOST, Model, Server, serve

KEY, OTHER_KEY = "key-of-the-first-team", "key/of=the+second~team"
REPOSITORY = "mlserver_torch_stream.GuardedModelRepository"
_READY_S = 120.0
_OPEN_PATHS = {
    "/health",
    "/ping",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/{model_name}/ready",
    "/v2/models/{model_name}/versions/{model_version}/ready",
    *page_paths(),
}
_OPEN_METHODS = {"ServerLive", "ServerReady", "ModelReady"}
_SERVICE = "inference.GRPCInferenceService"


@dataclass(frozen=True)
class Guarded:
    """A server with keys and TLS, and what its clients need."""

    server: Server
    authority: Authority
    keys_file: Path

    @property
    def url(self) -> str:
        return f"https://{HOST}:{self.server.http_port}"

    def http(self, key: str | None = KEY) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        return httpx.Client(base_url=self.url, verify=context, headers=headers, timeout=v2.TIMEOUT_S)

    def channel(self, target: str) -> grpc.Channel:
        credentials = grpc.ssl_channel_credentials(self.authority.certificate.read_bytes())
        return grpc.secure_channel(target, credentials)


@pytest.fixture(scope="module")
def guarded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    authority = Authority(folder / "tls")
    own = authority.sign("server")
    keys_file = folder / "keys"
    keys_file.write_text(f"# two teams\n{KEY}\n\n  {OTHER_KEY}\r\n")
    for source in (foreign, route_lister):
        shutil.copy(str(source.__file__), folder)
    models = [
        Model("tiny", str(tiny_model)),
        Model("foreign", None, "foreign.Foreign"),
        Model("lister", None, "route_lister.RouteLister"),
    ]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "MLSERVER_MODEL_REPOSITORY_IMPLEMENTATION": REPOSITORY,
        "MLSERVER_TORCH_STREAM_API_KEYS_FILE": str(keys_file),
        "MLSERVER_TORCH_STREAM_TLS_CERT_FILE": str(own.certificate),
        "MLSERVER_TORCH_STREAM_TLS_KEY_FILE": str(own.key),
        "MLSERVER_TORCH_STREAM_BATCH_STORE": str(folder / "batches"),
        "MLSERVER_TORCH_STREAM_PAGE": "true",
    }
    with serve(folder / "models", models, settings=QUIET, environment=environment, ready=False, triton=True) as running:
        found = Guarded(running, authority, keys_file)
        _wait(lambda: _is_ready(found), running, _READY_S)
        yield found


def _is_ready(found: Guarded) -> bool:
    with found.http(key=None) as asking:
        return all(_answers(asking, f"/v2/models/{name}/ready") for name in ("tiny", "foreign", "lister"))


def _wait(condition: Callable[[], bool], server: Server, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert server.process.poll() is None and time.monotonic() < end, server.log
        time.sleep(0.1)


def _paths(path: str) -> list[str]:
    """Returns the path of a route for a model of ours, for another runtime's model, and for an unknown model."""
    names = ("tiny", "foreign", "nothing") if "{model_name" in path else ("",)
    filled = [re.sub(r"\{model_name(:path)?\}", name, path) for name in names]
    return [re.sub(r"\{\w+(:path)?\}", "x", each) for each in filled]


def test_every_rest_endpoint_refuses_without_a_key_but_for_health(guarded: Guarded) -> None:
    """The table is that of the running application, and includes the routes of other runtimes and MLServer's own."""
    with guarded.http() as asking:
        routes = [(path, method) for path, methods in asking.get("/routes").json() for method in methods]
    assert {"/routes", "/v2", "/metrics", "/v1/files", "/v2/repository/index"} <= {path for path, _ in routes}
    with guarded.http(key=None) as asking:
        answered = {
            (path, method): {asking.request(method, each).status_code for each in _paths(path)}
            for path, method in routes
        }
    open_routes = {(path, method) for path, method in routes if path in _OPEN_PATHS and method in ("GET", "HEAD")}
    assert {path for path, _ in open_routes} == _OPEN_PATHS
    assert {route for route, statuses in answered.items() if 401 not in statuses} == open_routes
    assert {route for route, statuses in answered.items() if statuses != {401}} == open_routes


def test_a_path_that_no_route_has_and_another_method_of_an_open_one_need_a_key(guarded: Guarded) -> None:
    with guarded.http(key=None) as asking:
        closed = [("GET", "/nowhere"), ("OPTIONS", "/v1/models"), ("POST", "/v2/health/ready")]
        for method, path in (*closed, ("POST", "/"), ("GET", "/page/nothing.js"), ("GET", "/page/../v2")):
            assert asking.request(method, path).status_code == 401
        for path in ("/v2/models/tiny/ready/", "/v2/models/tiny/infer?x=/health", "/v2//health/live", "/health/../v2"):
            assert asking.get(path).status_code == 401


def test_the_page_is_open_where_it_is_on_and_absent_where_nobody_asked_for_it(guarded: Guarded, server: Server) -> None:
    with guarded.http(key=None) as asking:
        for path, file in page_files().items():
            assert asking.get(path).content == file.content
        assert asking.get("/v1/models").status_code == 401
    assert {plain_http.get(f"{server.url}{path}").status_code for path in page_files()} == {404}


def test_metrics_need_a_key_on_their_own_port_too(guarded: Guarded) -> None:
    url = f"https://{HOST}:{guarded.server.metrics_port}/metrics"
    with guarded.http(key=None) as without, guarded.http() as with_key:
        assert without.get(url).status_code == 401
        assert "torch_stream_" in with_key.get(url).text


def _grpc_methods(*descriptors: object) -> list[str]:
    services = [service for each in descriptors for service in each.services_by_name.values()]  # type: ignore[attr-defined]
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


def _triton_methods() -> list[str]:
    servicer = TritonServicer(cast(ServerHost, SimpleNamespace(servicer=lambda: None)), cast(ServerState, None), 0.0)
    return list(servicer.handler()._method_handlers)


def _codes(channel: grpc.Channel, methods: list[str], metadata: list[tuple[str, str]]) -> dict[str, grpc.StatusCode]:
    found = {}
    for method in methods:
        call = channel.stream_stream(method)(iter([b""]), metadata=metadata, timeout=v2.TIMEOUT_S)
        with suppress(grpc.RpcError):
            list(call)
        found[method.rpartition("/")[2]] = call.code()
    return found


@pytest.mark.parametrize("port", ["mlserver", "triton"])
@pytest.mark.parametrize("metadata", [[], [("authorization", "Bearer wrong")]], ids=["without", "wrong"])
def test_every_grpc_method_refuses_without_a_key_but_for_health(
    guarded: Guarded, port: str, metadata: list[tuple[str, str]]
) -> None:
    if port == "mlserver":
        methods, target = _grpc_methods(dataplane_pb2.DESCRIPTOR, model_repository_pb2.DESCRIPTOR), "grpc_target"
        assert len(methods) == 13
    else:
        methods, target = _triton_methods(), "triton_target"
        assert f"/{_SERVICE}/ModelStreamInfer" in methods
    with guarded.channel(getattr(guarded.server, target)) as channel:
        codes = _codes(channel, [*methods, f"/{_SERVICE}/NoSuchMethod"], metadata)
    unauthenticated = {name for name, code in codes.items() if code is grpc.StatusCode.UNAUTHENTICATED}
    assert codes.keys() - unauthenticated == _OPEN_METHODS


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v2/models/tiny/infer", ("error",)),
        ("/v2/models/tiny/generate_stream", ("error",)),
        ("/v1/chat/completions", ("error", "code", "invalid_api_key")),
        ("/openai/v1/models", ("error", "type", "invalid_request_error")),
        ("/v1/messages", ("error", "type", "authentication_error")),
        ("/predictions/tiny", ("type", "InvalidKeyException")),
        ("/v1/models/tiny:predict", ("code", 401)),
    ],
)
def test_a_refusal_has_the_spelling_of_its_path(guarded: Guarded, path: str, expected: tuple[object, ...]) -> None:
    with guarded.http(key="a-secret-typing-error") as asking:
        response = asking.post(path, json={})
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    assert "a-secret-typing-error" not in response.text + str(response.headers)
    said = response.json()
    *keys, value = expected if len(expected) > 1 else (*expected, None)
    for key in keys:
        said = said[key]
    assert value in (None, said) and "Authorization: Bearer" in response.text


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Basic {KEY}",
        KEY,
        f"Bearer {KEY},{OTHER_KEY}",
        "Bearer #",
    ],
)
def test_what_is_no_key_is_refused(guarded: Guarded, authorization: str) -> None:
    with guarded.http(key=None) as asking:
        assert asking.get("/v2", headers={"Authorization": authorization}).status_code == 401


def test_a_key_may_be_in_anthropics_header(guarded: Guarded) -> None:
    with guarded.http(key=None) as asking:
        for headers, status in (
            ([("X-Api-Key", KEY)], 200),
            ([("X-Api-Key", KEY), ("Authorization", "Bearer another")], 200),
            ([("X-Api-Key", f"{KEY}x")], 401),
            ([("X-Api-Key", f"Bearer {KEY}")], 401),
            ([("X-Api-Key", KEY), ("X-Api-Key", KEY)], 401),
        ):
            assert asking.get("/v2", headers=headers).status_code == status, headers


def test_two_keys_at_once_are_refused(guarded: Guarded) -> None:
    with guarded.http(key=None) as asking:
        headers = [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {KEY}")]
        assert asking.get("/v2", headers=headers).status_code == 401


def test_a_body_is_not_read_before_its_key_is_checked(guarded: Guarded) -> None:
    """The client waits for ``100 Continue`` before it sends a gigabyte, and is refused before that."""
    head = (
        "POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1000000000\r\n\r\n"
    )
    context = ssl.create_default_context(cafile=str(guarded.authority.certificate))
    with (
        socket.create_connection((HOST, guarded.server.http_port), 10) as plain,
        context.wrap_socket(plain, server_hostname=HOST) as connection,
    ):
        connection.sendall(head.encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_a_connection_goes_on_after_a_refusal_whatever_its_body_was(guarded: Guarded) -> None:
    with guarded.http(key=None) as asking:
        for key, status in (("wrong", 401), (KEY, 422)) * 2:
            headers = {"Authorization": f"Bearer {key}"}
            response = asking.post("/v2/models/tiny/infer", content=b"x" * 1_000_000, headers=headers)
            assert response.status_code == status


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
def test_with_a_key_all_is_as_without_keys(guarded: Guarded, key: str) -> None:
    with guarded.http(key) as asking:
        streamed = asking.post("/v2/models/tiny/generate_stream", json={"text_input": "Hello", "max_tokens": 4})
        chat = asking.post("/v1/chat/completions", json={**openai.talk(), "max_tokens": 4})
        assert asking.get("/v2/models/nothing").status_code == 404
    assert streamed.headers["content-type"].startswith("text/event-stream") and "data: " in streamed.text
    assert chat.json()["usage"]["completion_tokens"] == 4
    request = v2.grpc_request("tiny", "Hello", max_tokens=4, ignore_eos=True)
    metadata = (("authorization", f"bearer {key}"),)
    with guarded.channel(guarded.server.grpc_target) as channel:
        stub = GRPCInferenceServiceStub(channel)
        replies = stub.ModelStreamInfer(iter([request]), timeout=v2.TIMEOUT_S, metadata=metadata)
        assert (
            v2.joined(map(v2.grpc_reply, replies))
            == v2.grpc_reply(stub.ModelInfer(request, timeout=v2.TIMEOUT_S, metadata=metadata)).text
        )
    with guarded.channel(guarded.server.triton_target) as channel:
        assert list(triton_wire.stream(channel, [request], metadata=metadata))


def test_the_file_of_keys_is_read_again_when_it_changes(guarded: Guarded) -> None:
    """A new key counts at once, and a removed one no longer; if the file is deleted, the last keys remain valid."""

    def statuses() -> list[int]:
        with guarded.http() as old, guarded.http("a-third-key") as new:
            return [asking.get("/v2").status_code for asking in (old, new)]

    before = guarded.keys_file.read_text()
    assert statuses() == [200, 401]
    try:
        guarded.keys_file.write_text("a-third-key\n")
        assert statuses() == [401, 200]
        for _ in range(3):
            guarded.keys_file.unlink(missing_ok=True)
            assert statuses() == [401, 200]
        assert guarded.server.log.count("again, so the earlier ones stay valid: No such file") == 1
    finally:
        guarded.keys_file.write_text(before)
    assert statuses() == [200, 401]


@pytest.mark.parametrize("port", ["grpc", "triton"])
def test_a_stream_takes_no_request_once_its_key_is_removed(guarded: Guarded, port: str) -> None:
    """Requests that are already being answered are completed."""
    asked: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    request = v2.grpc_request("tiny", "Hello", max_tokens=40, ignore_eos=True).SerializeToString()
    metadata = (("authorization", f"Bearer {KEY}"),)
    before = guarded.keys_file.read_text()
    with guarded.channel(getattr(guarded.server, f"{port}_target")) as channel:
        method = channel.stream_stream(f"/{_SERVICE}/ModelStreamInfer")
        call = method(iter(asked.get, None), timeout=v2.TIMEOUT_S, metadata=metadata)
        asked.put(request)
        received = [next(call)]
        try:
            guarded.keys_file.write_text("a-third-key\n")
            asked.put(request)
            with pytest.raises(grpc.RpcError) as refused:
                received += call
        finally:
            guarded.keys_file.write_text(before)
            asked.put(None)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert b"usage_completion_tokens" in received[-1]


def test_neither_keys_nor_wrong_keys_are_in_the_log(guarded: Guarded) -> None:
    with guarded.http() as asking, guarded.http("a-secret-typing-error") as wrong:
        body = {"id": "keys-last", "text_input": "Hello", "max_tokens": 2}
        assert wrong.post("/v2/models/tiny/generate", json=body).status_code == 401
        assert asking.post("/v2/models/tiny/generate", json=body).is_success
    _wait(lambda: "request_id=keys-last " in guarded.server.log, guarded.server)
    assert not any(secret in guarded.server.log for secret in (KEY, OTHER_KEY, "a-secret-typing-error"))


def test_without_tls_nothing_is_answered(guarded: Guarded) -> None:
    for port in (guarded.server.http_port, guarded.server.metrics_port):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{HOST}:{port}/v2/health/live", timeout=10)
    for target in (guarded.server.grpc_target, guarded.server.triton_target):
        with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError) as refused:
            GRPCInferenceServiceStub(channel).ServerLive(dataplane_pb2.ServerLiveRequest(), timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_client_that_trusts_another_authority_does_not_trust_the_server(guarded: Guarded, tmp_path: Path) -> None:
    other = Authority(tmp_path)
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(guarded.url, verify=ssl.create_default_context(cafile=str(other.certificate)))


@pytest.mark.parametrize("scheme", ["https", "grpcs"])
def test_our_client_sends_a_key_and_trusts_an_authority(guarded: Guarded, scheme: str) -> None:
    port = guarded.server.http_port if scheme == "https" else guarded.server.grpc_port
    options: dict[str, Any] = {"ca_file": guarded.authority.certificate}
    url = f"{scheme}://{HOST}:{port}"
    with client.Client(url, api_key=KEY, **options) as asking:
        assert "tiny" in asking.models()
        said = "".join(delta.text for delta in asking.stream("tiny", "Hello", max_tokens=4))

    async def again() -> str:
        async with client.AsyncClient(url, api_key=KEY, **options) as other:
            return "".join([delta.text async for delta in other.stream("tiny", "Hello", max_tokens=4)])

    assert asyncio.run(again()) == said
    with client.Client(url, **options) as asking, pytest.raises(client.RequestRefused, match="needs a key") as refused:
        list(asking.stream("tiny", "Hello"))
    assert refused.value.status == 401
    with client.Client(url, api_key=KEY) as asking, pytest.raises(client.ConnectionFailed):
        asking.models()


def test_the_chat_sends_the_key_of_a_file_and_trusts_an_authority(guarded: Guarded) -> None:
    options = ["--api-key-file", str(guarded.keys_file), "--ca-file", str(guarded.authority.certificate)]
    command = [sys.executable, "-m", "mlserver_torch_stream.cli", "chat", "--url", guarded.url, "--model", "tiny"]
    for more, status in ((options, 0), (options[2:], 1)):
        asked = subprocess.run(
            [*command, "--max-tokens", "4", *more], input="Hello\n", capture_output=True, text=True, timeout=60
        )
        assert asked.returncode == status and ("needs a key" in asked.stderr) == bool(status), asked.stderr


def test_what_serve_prints_of_a_server_with_a_key_and_tls_streams(guarded: Guarded) -> None:
    """Runs both the printed request and the chat; the certificate that they trust is the server's own."""
    certificate = guarded.authority.certificate.with_name("server.pem")
    prefix, out = "MLSERVER_TORCH_STREAM_", io.StringIO()
    environ = {f"{prefix}API_KEYS_FILE": str(guarded.keys_file), f"{prefix}TLS_CERT_FILE": str(certificate)}
    Announcement(HOST, guarded.server.http_port, environ).wait_and_print(out, limit=30)
    curl, chat = (line.strip() for line in out.getvalue().splitlines() if "/tiny/" in line or "--model tiny" in line)
    answer = subprocess.run(["bash", "-c", curl], env={**os.environ, "KEY": KEY}, capture_output=True, timeout=60)
    assert answer.stdout.startswith(b"data: "), answer
    command = [sys.executable, "-m", "mlserver_torch_stream.cli", *shlex.split(chat)[1:], "--max-tokens", "4"]
    asked = subprocess.run(command, input=b"Hello\n", capture_output=True, timeout=60)
    assert asked.returncode == 0, asked.stderr


def test_before_any_model_is_loaded_the_ports_are_guarded(tmp_path: Path) -> None:
    """A server without models: clients must show a certificate, and metrics and repository are open."""
    authority = Authority(tmp_path / "tls")
    own, ours = authority.sign("server"), authority.sign("client")
    (tmp_path / "keys").write_text(KEY)
    environment = {
        "MLSERVER_MODEL_REPOSITORY_IMPLEMENTATION": REPOSITORY,
        "MLSERVER_LOAD_MODELS_AT_STARTUP": "false",
        "MLSERVER_TORCH_STREAM_API_KEYS_FILE": str(tmp_path / "keys"),
        "MLSERVER_TORCH_STREAM_METRICS_WITHOUT_KEY": "true",
        "MLSERVER_TORCH_STREAM_REPOSITORY_WITHOUT_KEY": "true",
        "MLSERVER_TORCH_STREAM_TLS_CERT_FILE": str(own.certificate),
        "MLSERVER_TORCH_STREAM_TLS_KEY_FILE": str(own.key),
        "MLSERVER_TORCH_STREAM_TLS_CLIENT_CA_FILE": str(authority.certificate),
    }
    strange = ssl.create_default_context(cafile=str(authority.certificate))
    context = ssl.create_default_context(cafile=str(authority.certificate))
    context.load_cert_chain(ours.certificate, ours.key)
    trusted = authority.certificate.read_bytes()
    credentials = grpc.ssl_channel_credentials(trusted, ours.key.read_bytes(), ours.certificate.read_bytes())
    with serve(tmp_path / "models", [], settings=QUIET, environment=environment, ready=False) as server:
        url = f"https://{HOST}:{server.http_port}"
        with httpx.Client(verify=context, timeout=v2.TIMEOUT_S) as asking:
            _wait(lambda: _answers(asking, f"{url}/v2/health/live"), server, _READY_S)
            assert asking.post(f"{url}/v2/repository/index", json={}).json() == []
            _wait(lambda: _answers(asking, f"https://{HOST}:{server.metrics_port}/metrics"), server)
            assert [asking.get(f"{url}{path}").status_code for path in ("/v2", "/v2/models/tiny")] == [401, 401]
        for port in (server.http_port, server.metrics_port):
            with pytest.raises(httpx.TransportError):
                httpx.get(f"https://{HOST}:{port}/v2/health/live", verify=strange)
        methods = _grpc_methods(dataplane_pb2.DESCRIPTOR, model_repository_pb2.DESCRIPTOR)
        with grpc.secure_channel(server.grpc_target, credentials) as channel:
            grpc.channel_ready_future(channel).result(_READY_S)
            refused = {
                method
                for method, code in _codes(channel, methods, []).items()
                if code is grpc.StatusCode.UNAUTHENTICATED
            }
            assert refused == {"ServerMetadata", "ModelMetadata", "ModelInfer", "ModelStreamInfer"}
        with grpc.secure_channel(server.grpc_target, grpc.ssl_channel_credentials(trusted)) as channel:
            assert set(_codes(channel, methods, []).values()) == {grpc.StatusCode.UNAVAILABLE}


def _answers(asking: httpx.Client, url: str) -> bool:
    try:
        return asking.get(url).is_success
    except httpx.TransportError:  # not listening yet
        return False


def test_the_example_of_the_page_serves_over_tls_to_those_who_have_the_key(tmp_path: Path) -> None:
    start, ask = (block.code for block in markdown.blocks("docs/security.md") if block.language == "bash")
    *preparation, command = start.splitlines()
    assert command == "mlserver-torch-stream serve"
    environment = _exported("\n".join(preparation), tmp_path)
    environment["MLSERVER_LOAD_MODELS_AT_STARTUP"] = "false"
    with serve(tmp_path / "models", [], settings=QUIET, environment=environment, ready=False) as server:
        ask = ask.replace(":8080/", f":{server.http_port}/")
        _wait(lambda: _shell(ask, tmp_path).returncode == 0, server, _READY_S)
        assert json.loads(_shell(ask, tmp_path).stdout)["object"] == "list"
        keyless = re.sub(r'-H ".*" ', "", ask)
        assert json.loads(_shell(keyless, tmp_path).stdout)["error"]["code"] == "invalid_api_key"


def _exported(script: str, folder: Path) -> dict[str, str]:
    """Returns the variables that the script exports when it runs in the folder."""
    done = _shell(f"{script}\necho\nexport -p", folder)
    assert done.returncode == 0, done.stderr
    return {
        name: shlex.split(value)[0]
        for name, value in re.findall(r"^declare -x (MLSERVER_\w+)=(.*)$", done.stdout, re.M)
    }


def _shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-euc", script], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
