"""Other paths of TorchServe's inference port than predictions: descriptions, and the paths of its predecessor."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests import plain_http
from tests.server.harness import Server

_TIMEOUT_S = 60.0


def _ask(server: Server, method: str, path: str, **options: Any) -> httpx.Response:
    return plain_http.request(method, f"{server.url}{path}", timeout=_TIMEOUT_S, **options)


def test_the_server_describes_its_paths(predictions_server: Server) -> None:
    described = _ask(predictions_server, "OPTIONS", "/")
    assert described.status_code == 200 and described.headers["content-type"] == "application/json"
    document = described.json()
    assert document == _ask(predictions_server, "GET", "/api-description").json()
    assert document["openapi"] == "3.0.1" and document["info"]["title"] == "TorchServe APIs"
    operations = {
        path: {method: each["operationId"] for method, each in methods.items()}
        for path, methods in document["paths"].items()
    }
    assert operations == {
        "/": {"options": "apiDescription"},
        "/ping": {"get": "ping"},
        "/v1/models/{model_name}:predict": {"post": "v1_predictions"},
        "/v2/models/{model_name}/infer": {"post": "v2_infer"},
        "/predictions/{model_name}": {"post": "predictions"},
        "/predictions/{model_name}/{model_version}": {"post": "version_predictions"},
        "/api-description": {"get": "api-description"},
        "/metrics": {"get": "metrics"},
    }
    for path, methods in document["paths"].items():
        given = {each["name"] for operation in methods.values() for each in operation.get("parameters", ())}
        assert given == {part for part in ("model_name", "model_version") if f"{{{part}}}" in path}


def test_every_described_path_is_there(predictions_server: Server) -> None:
    paths = _ask(predictions_server, "OPTIONS", "/").json()["paths"]
    paths |= _ask(predictions_server, "OPTIONS", "/predictions/hello").json()["paths"]
    paths |= _ask(predictions_server, "OPTIONS", "/predictions/tokens/1.0").json()["paths"]
    assert len(paths) == 14
    for path, methods in paths.items():
        for method in methods:
            full = path.format(model_name="hello", model_version="1.0")
            assert _ask(predictions_server, method.upper(), full, content=b"x").status_code not in (404, 405), full


def test_a_model_describes_its_paths(predictions_server: Server) -> None:
    for path in ("/predictions/hello", "/predictions/hello/1.0", "/explanations/hello"):
        document = _ask(predictions_server, "OPTIONS", path).json()
        assert document["info"] == {"title": "RESTful API for: hello", "version": "1.0.0"}
        assert list(document["paths"]) == ["/predictions/hello", "/v1/models/hello:predict", "/v2/models/hello/infer"]
    of_tokens = _ask(predictions_server, "OPTIONS", "/predictions/tokens").json()
    assert "/predictions/tokens/v1/chat/completions" in of_tokens["paths"]
    unknown = _ask(predictions_server, "OPTIONS", "/predictions/nobody")
    assert (unknown.status_code, unknown.json()["type"]) == (404, "ModelNotFoundException")


def test_other_methods_of_the_root_are_mlservers(predictions_server: Server) -> None:
    response = _ask(predictions_server, "GET", "/")
    assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})


@pytest.mark.parametrize("path", ["/models/assistant/invoke", "/assistant/predict", "/assistant/1.0/predict"])
def test_older_paths_lead_to_the_handler_with_the_parameters_of_the_query(
    predictions_server: Server, path: str
) -> None:
    got = _ask(predictions_server, "POST", f"{path}?size=2&word=a%20b", content=b"x").json()
    word = ["bytearray", "a b"]
    assert got["data"] == {"size": ["bytearray", "2"], "word": word, "body": ["bytearray", "x"]}
    form = _ask(predictions_server, "POST", f"{path}?size=2", data={"word": "a b"}).json()
    assert form["data"] == {"size": ["bytearray", "2"], "word": word}
    assert "size" not in _ask(predictions_server, "POST", "/predictions/assistant?size=2", content=b"x").json()["data"]


@pytest.mark.parametrize("path", ["/models/nobody/invoke", "/nobody/predict", "/nobody/1.0/predict", "/invocations"])
def test_an_older_path_of_no_model_is_left_to_mlserver(predictions_server: Server, path: str) -> None:
    response = _ask(predictions_server, "POST", path, content=b"x")
    assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})


def test_the_rest_of_a_path_reaches_the_handler(predictions_server: Server) -> None:
    for path, rest in (
        ("/predictions/assistant", ""),
        ("/predictions/assistant/1.0", ""),
        ("/predictions/assistant/1.0/a/b%20c/", "a/b c"),
        ("/explanations/assistant/1.0/a", "a"),
        ("/predictions/assistant/v1/a", "v1/a"),
    ):
        got = _ask(predictions_server, "POST", path, content=b"x", headers={"url_path": "mine"}).json()
        assert got["headers"]["url_path"] == rest, path
    assert _ask(predictions_server, "GET", "/predictions/assistant/1.0/a").json()["headers"]["url_path"] == "a"
