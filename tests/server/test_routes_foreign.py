"""Somebody else's model beside ours: every answer is, byte for byte, that of a server without us."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.server import foreign, v2
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, serve

_FOREIGN = Model("foreign", None, implementation="foreign.Foreign", version="v1")
_DOORS = ("infer", "generate", "infer_stream", "generate_stream")
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
def servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Without us and beside us."""
    folder = tmp_path_factory.mktemp("foreign")
    shutil.copy(foreign.__file__, folder / "foreign.py")
    found = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with ExitStack() as stack:
        yield tuple(  # type: ignore[misc]
            stack.enter_context(serve(folder / name, models, settings=QUIET, environment={"PYTHONPATH": found}))
            for name, models in (("alone", [_FOREIGN]), ("beside", [_FOREIGN, Model("tiny", str(tiny_model))]))
        )


def _answer(server: Server, path: str, body: bytes, headers: dict[str, str]) -> tuple[object, ...]:
    given = {"content-type": "application/json", **headers}
    try:
        response = httpx.post(f"{server.url}{path}", content=body, headers=given, timeout=v2.TIMEOUT_S)
    except httpx.RemoteProtocolError:
        return ("broken off",)  # what a stock stream does when its model fails
    kept = {name: value for name, value in response.headers.items() if name != "date"}
    return response.status_code, kept, response.content


@pytest.mark.parametrize("door", _DOORS)
@pytest.mark.parametrize("version", ["", "/versions/v1"])
@pytest.mark.parametrize("kind", _BODIES)
def test_a_foreign_models_answers_are_untouched(
    servers: tuple[Server, Server], door: str, version: str, kind: str
) -> None:
    alone, beside = (_answer(each, f"/v2/models/foreign{version}/{door}", *_BODIES[kind]) for each in servers)
    assert beside == alone


@pytest.mark.parametrize("path", ["", "/ready", "/versions/v1/ready", "/infer", "/docs/dataplane.json"])
def test_a_foreign_models_other_routes_are_untouched(servers: tuple[Server, Server], path: str) -> None:
    alone, beside = (httpx.get(f"{each.url}/v2/models/foreign{path}") for each in servers)
    assert (beside.status_code, beside.content) == (alone.status_code, alone.content)


@pytest.mark.parametrize("door", _DOORS)
@pytest.mark.parametrize("model", ["nobody", "nobody/versions/v1", "foreign/versions/v2", "tiny/versions/v2"])
def test_an_unknown_model_or_version_is_404_on_every_door(
    servers: tuple[Server, Server], model: str, door: str
) -> None:
    _, beside = servers
    response = httpx.post(f"{beside.url}/v2/models/{model}/{door}", json=v2.rest_body("a"), timeout=v2.TIMEOUT_S)
    assert response.status_code == 404
    assert model.partition("/")[0] in response.json()["error"]
