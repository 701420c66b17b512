"""The clients of OpenAI's API, each in an environment of its own, against one real server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import pytest

from tests import markdown
from tests.clients.environments import PACKAGES, make_environment
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, serve

_HERE = Path(__file__).parent
_RUN_S = 400
_TABLE = [
    (markdown.code_spans(client)[0], version, features.split("; "))
    for client, version, features in markdown.table("docs/openai.md", "Clients")
]
_ROWS = {client: features for client, _, features in _TABLE}
_VERSIONS = {client: version for client, version, _ in _TABLE}
_CELLS = [(client, feature) for client, features in _ROWS.items() for feature in features]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Steps take their time, so that a queue can be full. ``narrow`` has one row and one place in its queue."""
    models = [
        Model("tiny", str(tiny_model)),
        Model("narrow", str(tiny_model), extra={"max_queued_requests": 1, "max_num_seqs": 1}),
    ]
    environment = {"MLSERVER_TORCH_STREAM_FAULTS": "decode:1:slow=0.02"}
    folder = tmp_path_factory.mktemp("clients") / "models"
    with serve(folder, models, settings=QUIET, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def results(served: Server, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(served, tmp_path_factory.mktemp("environments"))


class Results:
    """How the features of each client ended; a client runs when it is first asked for."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._server = server
        self._folder = folder

    @lru_cache  # noqa: B019
    def of(self, client: str) -> Mapping[str, str | None]:
        python = make_environment(self._folder, client)
        script = _HERE / f"with_{client.replace('-', '_')}.py"
        command = [str(python), str(script), self._server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        ended: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
        return ended


@pytest.mark.parametrize(("client", "feature"), _CELLS)
def test_a_client_does_what_the_page_says(results: Results, client: str, feature: str) -> None:
    trouble = results.of(client)[feature]
    assert trouble is None, trouble


@pytest.mark.parametrize("client", _ROWS)
def test_the_page_tells_all_that_is_tried(results: Results, client: str) -> None:
    assert sorted(results.of(client)) == sorted(_ROWS[client])
    assert _VERSIONS[client] == PACKAGES[client][0].rpartition("==")[2]
