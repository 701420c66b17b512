"""The openai SDK, in an environment of its own, through a proxy as Seldon Core 2 runs it, against a real server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.clients.environments import make_environment
from tests.server.conftest import QUIET
from tests.server.harness import Model, serve
from tests.server.seldon_proxy import seldon_proxy

_SCRIPT = Path(__file__).with_name("with_openai_behind_seldon.py")
_RUN_S = 400

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ended(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str | None]]:
    """How each feature ended. Steps take their time, so that the queue of ``narrow`` can be full."""
    models = [
        Model("tiny_1", str(tiny_model)),
        Model("narrow_1", str(tiny_model), extra={"max_queued_requests": 1, "max_num_seqs": 1}),
    ]
    environment = {"MLSERVER_TORCH_STREAM_FAULTS": "decode:1:slow=0.02"}
    folder = tmp_path_factory.mktemp("seldon")
    python = make_environment(folder, "openai")
    versions = {"tiny": "tiny_1", "narrow": "narrow_1"}
    with (
        serve(folder / "models", models, settings=QUIET, environment=environment) as running,
        seldon_proxy(running, versions) as url,
    ):
        command = [str(python), str(_SCRIPT), url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        yield json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "feature",
    ["chat", "chat, streamed", "stream helper", "log-probabilities", "errors", "retries after Retry-After"],
)
def test_the_openai_sdk_works_behind_seldon(ended: Mapping[str, str | None], feature: str) -> None:
    assert ended[feature] is None, ended[feature]
