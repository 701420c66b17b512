"""For files and batches, a real server matches its OpenAPI document, and no input causes a status 500."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import plain_http
from tests.batches.conftest import serve_batches
from tests.clients.environments import make_environment
from tests.server.harness import Model

_CLIENTS = Path(__file__).parent.parent / "clients"
_EXAMPLES = 40  # of each kind and path
_BOUND_S = 900

pytestmark = pytest.mark.slow


def test_the_server_keeps_to_its_document_of_files_and_batches(tiny_model: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environments", "schemathesis")
    with serve_batches(tmp_path / "models", [Model("tiny", str(tiny_model))], tmp_path / "store") as server:
        document = tmp_path / "openapi.json"
        document.write_bytes(plain_http.get(f"{server.url}/v1/openapi.json").raise_for_status().content)
        options = ["--phases=coverage,fuzzing", f"--max-examples={_EXAMPLES}", "--generation-deterministic"]
        options += ["--exclude-checks=positive_data_acceptance", "--continue-on-failure", "--no-color"]
        options += ["--request-timeout=60", "--include-path-regex=^/v1/(files|batches)"]
        command = [str(python.with_name("schemathesis")), "run", str(document), "--url", server.url, *options]
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "bad_input_is_named", "PYTHONPATH": str(_CLIENTS)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=_BOUND_S, check=False
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert "Traceback" not in server.log
