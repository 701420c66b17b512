"""Servers on which files and batches are off: the error says why, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import plain_http
from tests.batches.api import error
from tests.batches.conftest import serve_batches
from tests.server.harness import Model

_PATHS = (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/openai/v1/batches"), ("POST", "/v1/batches"))


def _without_obstore(folder: Path) -> dict[str, str]:
    """Returns the environment of a process that cannot import the library."""
    package = folder / "hidden" / "obstore"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('not installed')\n")
    return {"PYTHONPATH": str(package.parent)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "said", "hidden"),
    [
        ("", "MLSERVER_TORCH_STREAM_BATCH_STORE is not set", False),
        ("store", "pip install 'mlserver-torch-stream[cloud]'", True),
        ("ftp://host/batches", "unknown scheme 'ftp'", False),
        ("http://127.0.0.1/batches", "an HTTP server can only be read", False),
    ],
)
def test_a_server_without_batches_says_why_and_serves_its_models(
    tiny_model: Path, tmp_path: Path, store: str, said: str, hidden: bool
) -> None:
    place = str(tmp_path / store) if store == "store" else store
    environment = _without_obstore(tmp_path) if hidden else {}
    with serve_batches(tmp_path / "off", [Model("tiny", str(tiny_model))], place, environment) as server:
        for method, path in _PATHS:
            status, _, message = error(plain_http.request(method, f"{server.url}{path}", timeout=20))
            assert status == 404 and said in message and "MLSERVER_TORCH_STREAM_BATCH_STORE" in message
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        assert plain_http.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
