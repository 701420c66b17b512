"""Invalid settings of keys and TLS: each is named, and ends the start. Runs in this process, without a server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption
from mlserver.grpc import server as grpc_server
from mlserver.metrics.server import MetricsServer
from mlserver.rest.server import RESTServer
from mlserver.settings import Settings
from starlette.types import Message, Receive, Scope, Send

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.server.access.access_control import AccessControl, ApiKeys, OpenEndpoints
from mlserver_torch_stream.server.access.guards import RestGuard
from mlserver_torch_stream.server.access.model_repository import install
from mlserver_torch_stream.server.options import ServerOptions
from tests.certificates import Authority


def _configured(**options: str | bool) -> AccessControl:
    access = AccessControl()
    access.configure(ServerOptions(**options))  # type: ignore[arg-type]
    return access


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("", "has no keys"),
        ("# a comment\n\n", "has no keys"),
        ("good\nthe secret one\n", "line 2 of"),
        ("sécret\n", "line 1 of"),
    ],
)
def test_a_file_of_keys_that_is_none_is_named_and_never_quoted(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError) as refused:
        _configured(api_keys_file=str(path))
    message = str(refused.value)
    assert message.startswith("MLSERVER_TORCH_STREAM_API_KEYS_FILE: ") and str(path) in message and said in message
    assert "cret" not in message


def test_keys_of_a_server_whose_ports_are_open_already_are_refused(tmp_path: Path) -> None:
    access, options = AccessControl(), ServerOptions(api_keys_file=str(tmp_path))
    with pytest.raises(SettingsError, match=r"REPOSITORY_IMPLEMENTATION=\S+GuardedModelRepository"):
        access.check(options)
    access.configure(ServerOptions())
    access.check(options)


def _certificate_alone(authority: Authority) -> dict[str, Path]:
    return {"tls_cert_file": authority.sign("own").certificate}


def _authority_alone(authority: Authority) -> dict[str, Path]:
    return {"tls_client_ca_file": authority.certificate}


def _key_of_another(authority: Authority) -> dict[str, Path]:
    return {"tls_cert_file": authority.sign("own").certificate, "tls_key_file": authority.sign("other").key}


def _encrypted_key(authority: Authority) -> dict[str, Path]:
    own = authority.sign("own", BestAvailableEncryption(b"password"))
    return {"tls_cert_file": own.certificate, "tls_key_file": own.key}


def _no_such_authority(authority: Authority) -> dict[str, Path]:
    own = authority.sign("own")
    return {"tls_cert_file": own.certificate, "tls_key_file": own.key, "tls_client_ca_file": own.key}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (_certificate_alone, "TLS_KEY_FILE: is not set, but TLS needs both a certificate and its key"),
        (_authority_alone, "TLS_CERT_FILE: is not set, but TLS needs both a certificate and its key"),
        (_key_of_another, "TLS_CERT_FILE and MLSERVER_TORCH_STREAM_TLS_KEY_FILE: cannot be used"),
        (_encrypted_key, "TLS_CERT_FILE and MLSERVER_TORCH_STREAM_TLS_KEY_FILE: cannot be used"),
        (_no_such_authority, "TLS_CLIENT_CA_FILE: cannot be used"),
    ],
)
def test_tls_that_cannot_be_is_named(files: Callable[[Authority], dict[str, Path]], said: str, tmp_path: Path) -> None:
    options = {name: str(path) for name, path in files(Authority(tmp_path)).items()}
    with pytest.raises(SettingsError, match=f"MLSERVER_TORCH_STREAM_{said}"):
        _configured(**options)


def test_a_file_of_keys_of_the_same_size_and_time_is_read_again(tmp_path: Path) -> None:
    """An archive with fixed times unpacks such files."""
    path = tmp_path / "keys"
    path.write_text("first-key")
    os.utime(path, (0, 0))
    keys = ApiKeys(str(path))
    assert keys.accept(["Bearer first-key"])
    path.write_text("other-key")
    os.utime(path, (0, 0))
    assert keys.accept(["Bearer other-key"]) and not keys.accept(["Bearer first-key"])


@pytest.mark.parametrize("cors", [None, {"allow_origins": ["https://a.org"], "allow_methods": ["POST"]}])
def test_a_preflight_needs_no_key_where_mlserver_answers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cors: dict[str, list[str]] | None
) -> None:
    """A browser sends no key with a preflight request. MLServer's middleware answers it, rather than a route."""
    (tmp_path / "keys").write_text("a-key")
    for listener in (RESTServer, MetricsServer):
        monkeypatch.setattr(listener, "_get_config", listener._get_config)
    monkeypatch.setattr(grpc_server, "aio", grpc_server.aio)
    install(_configured(api_keys_file=str(tmp_path / "keys")))
    server = RESTServer(Settings(cors_settings=cors), SimpleNamespace(), SimpleNamespace())
    asked = {"origin": "https://a.org", "access-control-request-method": "POST"}

    async def statuses() -> list[int]:
        transport = httpx.ASGITransport(server._get_config().app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            answers = [
                await client.options("/v2/models/m/infer", headers=asked),
                await client.options("/v2/models/m/infer"),
                await client.post("/v2/models/m/infer", headers=asked),
            ]
        return [answer.status_code for answer in answers]

    assert asyncio.run(statuses()) == [401 if cors is None else 200, 401, 401]


def test_a_web_socket_without_a_key_is_closed_before_it_is_open(tmp_path: Path) -> None:
    """uvicorn accepts web sockets if their libraries are installed, and other runtimes may have such routes."""
    (tmp_path / "keys").write_text("a-key")
    reached: list[str] = []
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["path"])

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def send(message: Message) -> None:
        sent.append(message)

    guard = RestGuard(app, _configured(api_keys_file=str(tmp_path / "keys")), None)
    for headers in ([], [(b"authorization", b"Bearer a-key")]):
        asyncio.run(guard({"type": "websocket", "path": "/health", "headers": headers}, receive, send))
    assert reached == ["/health"] and [message["type"] for message in sent] == ["websocket.close"]


@pytest.mark.parametrize(
    ("method", "path", "needs"),
    [
        ("GET", "/metrics", "metrics"),
        ("POST", "/metrics", None),
        ("POST", "/v2/repository/index", "repository"),
        ("POST", "/v2/repository/models/m/load", "repository"),
        ("POST", "/v2/repository/models/m/unload", "repository"),
        ("POST", "/v2/repository/models/m/n/load", None),
        ("GET", "/v2/health/live\n", None),
    ],
)
def test_metrics_and_the_repository_are_open_if_the_operator_says_so(method: str, path: str, needs: str | None) -> None:
    for name in ("metrics", "repository"):
        endpoints = OpenEndpoints(metrics=name == "metrics", repository=name == "repository")
        assert endpoints.rest(method, path, "/metrics") is (name == needs)
    assert not OpenEndpoints(metrics=True, repository=True).rest("GET", "/metrics", None)


@pytest.mark.parametrize(
    "service", ["inference.GRPCInferenceService", "inference.model_repository.ModelRepositoryService"]
)
def test_the_repository_is_open_over_grpc_too(service: str) -> None:
    for method in ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"):
        assert OpenEndpoints(metrics=False, repository=True).grpc(f"/{service}/{method}")
        assert not OpenEndpoints(metrics=True, repository=False).grpc(f"/{service}/{method}")
    assert not OpenEndpoints(metrics=True, repository=True).grpc(f"/{service}/ModelInfer")
