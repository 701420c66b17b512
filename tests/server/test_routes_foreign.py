"""A model of another runtime beside ours: every answer is, byte for byte, that of a server without our package."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import httpx
import pytest

from tests import plain_http
from tests.server import v2
from tests.server.conftest import FOREIGN, QUIET, with_foreign
from tests.server.harness import Server, serve

_ENDPOINTS = ("infer", "generate", "infer_stream", "generate_stream")
_BODY = json.dumps({"id": "mine", **v2.rest_body("a", inputs=[v2.bytes_tensor("more", "b", "ü")])}).encode()
_BODIES: dict[str, tuple[bytes, dict[str, str]]] = {
    "good": (_BODY, {}),
    "gzip": (gzip.compress(_BODY), {"content-encoding": "gzip"}),
    "fails": (json.dumps({"id": "mine", **v2.rest_body("fail")}).encode(), {}),
    "no-inputs": (b'{"id": "mine"}', {}),
    "flat": (b'{"text_input": "a"}', {}),
    "no-object": (b"[]", {}),
    "no-json": (b"{", {}),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without our package."""
    folder = tmp_path_factory.mktemp("foreign")
    with serve(folder / "models", [FOREIGN], settings=QUIET, environment=with_foreign(folder)) as running:
        yield running


def _answer(server: Server, path: str, body: bytes, headers: dict[str, str]) -> tuple[object, ...]:
    given = {"content-type": "application/json", **headers}
    try:
        response = plain_http.post(f"{server.url}{path}", content=body, headers=given, timeout=v2.TIMEOUT_S)
    except httpx.RemoteProtocolError:
        return ("broken off",)  # what a stock stream does when its model fails
    kept = {name: value for name, value in response.headers.items() if name != "date"}
    return response.status_code, kept, response.content


@pytest.mark.parametrize("endpoint", _ENDPOINTS)
@pytest.mark.parametrize("version", ["", "/versions/v1"])
@pytest.mark.parametrize("kind", _BODIES)
def test_a_foreign_models_answers_are_untouched(
    alone: Server, server: Server, endpoint: str, version: str, kind: str
) -> None:
    path = f"/v2/models/foreign{version}/{endpoint}"
    assert _answer(server, path, *_BODIES[kind]) == _answer(alone, path, *_BODIES[kind])


@pytest.mark.parametrize(
    "path",
    [
        "/predictions/foreign",
        "/predictions/foreign/v1",
        "/predictions/foreign/v1/v1/chat/completions",
        "/predictions/foreign/v1/chat/completions",
        "/explanations/foreign",
        "/v1/models/foreign:predict",
        "/v1/models/foreign:explain",
        "/models/foreign/invoke",
        "/foreign/predict",
        "/foreign/v1/predict",
        "/v1",
        "/v1/",
    ],
)
def test_torchserves_paths_of_a_foreign_model_are_untouched(alone: Server, server: Server, path: str) -> None:
    assert _answer(server, path, b"{}", {}) == _answer(alone, path, b"{}", {})


def test_a_foreign_route_below_v1_is_untouched(alone: Server, server: Server) -> None:
    """This holds for a method that the route does not support, too."""
    path = "/v1/own"
    assert _answer(server, path, b"{}", {}) == _answer(alone, path, b"{}", {})
    expected, found = (plain_http.get(f"{each.url}{path}") for each in (alone, server))
    assert found.status_code == expected.status_code == 405 and found.content == expected.content


@pytest.mark.parametrize("path", ["", "/ready", "/versions/v1/ready", "/infer", "/docs/dataplane.json"])
def test_a_foreign_models_other_routes_are_untouched(alone: Server, server: Server, path: str) -> None:
    expected, found = (plain_http.get(f"{each.url}/v2/models/foreign{path}") for each in (alone, server))
    assert (found.status_code, found.content) == (expected.status_code, expected.content)


@pytest.mark.parametrize("endpoint", _ENDPOINTS)
@pytest.mark.parametrize("model", ["nobody", "nobody/versions/v1", "foreign/versions/v2", "tiny/versions/v2"])
def test_an_unknown_model_or_version_is_404_on_every_endpoint(server: Server, model: str, endpoint: str) -> None:
    url = f"{server.url}/v2/models/{model}/{endpoint}"
    response = plain_http.post(url, json=v2.rest_body("a"), timeout=v2.TIMEOUT_S)
    assert response.status_code == 404
    assert model.partition("/")[0] in response.json()["error"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/openai/v1/completions"])
def test_a_foreign_model_is_refused_by_name_where_the_body_names_it(server: Server, path: str) -> None:
    refused = plain_http.post(f"{server.url}{path}", json={"model": "foreign", "prompt": "a"})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "model" and "foreign generates no tokens" in error["message"]
    listed = {model["id"] for model in plain_http.get(f"{server.url}/v1/models").json()["data"]}
    assert "tiny" in listed and "foreign" not in listed
