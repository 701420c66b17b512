"""The most common errors of users: an unknown model and a bad parameter, through every endpoint."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tests import plain_http
from tests.reliability.calls import ENDPOINTS, PLAIN_ENDPOINTS, Endpoint, ask
from tests.server import v2
from tests.server.harness import Server


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_unknown_model_is_404_and_not_found(plain: Server, endpoint: Endpoint) -> None:
    result = ask(endpoint, plain, "unknown")
    assert result.code == (404 if endpoint.rest else grpc.StatusCode.NOT_FOUND)
    assert "unknown" in result.said and not result.replies
    if endpoint.rest:
        assert result.headers["content-type"] == "application/json"


@pytest.mark.parametrize("endpoint", PLAIN_ENDPOINTS)
@pytest.mark.parametrize(("key", "value"), [("max_tokenz", 3), ("temperature", "hot"), ("top_k", -7), ("n", 0)])
def test_a_bad_parameter_is_422_and_invalid_argument(plain: Server, endpoint: Endpoint, key: str, value: Any) -> None:
    result = ask(endpoint, plain, "recite", **{key: value})
    assert result.code == (422 if endpoint.rest else grpc.StatusCode.INVALID_ARGUMENT)
    assert key in result.said and not result.replies


@pytest.mark.parametrize("path", ["infer", "infer_stream", "generate", "generate_stream"])
def test_every_route_says_it_in_json(plain: Server, path: str) -> None:
    cases: list[tuple[str, dict[str, Any], int, str]] = [
        ("nobody", {}, 404, "nobody"),
        ("recite", {"seeed": 1}, 422, "seeed"),
    ]
    for model, parameters, status, said in cases:
        url = f"{plain.url}/v2/models/{model}/{path}"
        response = plain_http.post(url, json=v2.rest_body("Hello", **parameters), timeout=v2.TIMEOUT_S)
        assert response.status_code == status and said in response.json()["error"]
        assert response.headers["content-type"] == "application/json"
