"""Health answers have the JSON of the Open Inference Protocol, which KServe's client and others read."""

from __future__ import annotations

import pytest

from tests import plain_http
from tests.server.harness import Server


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("health/live", {"live": True}),
        ("health/ready", {"ready": True}),
        ("models/tiny/ready", {"name": "tiny", "ready": True}),
        ("models/tiny/versions/v1/ready", {"name": "tiny", "ready": True}),
    ],
)
def test_health_is_told_as_json(server: Server, path: str, body: dict[str, object]) -> None:
    response = plain_http.get(f"{server.url}/v2/{path}", timeout=10)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    assert response.json() == body


@pytest.mark.parametrize("path", ["models/nobody/ready", "models/tiny/versions/v2/ready"])
def test_an_unknown_models_readiness_is_404(server: Server, path: str) -> None:
    assert plain_http.get(f"{server.url}/v2/{path}", timeout=10).status_code == 404
