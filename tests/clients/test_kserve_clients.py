"""KServe's own clients of the V2 protocol, in an environment of their own, against one real server."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import markdown
from tests.clients.environments import PACKAGES, make_environment
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, serve

_SCRIPT = Path(__file__).parent / "with_kserve.py"
_RUN_S = 400

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("kserve") / "models"
    with serve(folder, [Model("tiny", str(tiny_model))], settings=QUIET, triton=True) as running:
        yield running


def test_rest_and_grpc_on_both_ports(served: Server, tmp_path: Path) -> None:
    """Health, infer with JSON and with raw bytes, chosen outputs, refusals: the same text everywhere."""
    python = make_environment(tmp_path, "kserve")
    command = [str(python), str(_SCRIPT), served.url, served.grpc_target, served.triton_target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S, check=False)
    assert done.returncode == 0 and done.stdout == "done\n", done.stdout + done.stderr[-3000:]
    assert "Traceback" not in served.log


def test_the_page_names_the_version_that_is_tried() -> None:
    version = PACKAGES["kserve"][0].rpartition("==")[2]
    for section in ("Clients over REST", "Clients over gRPC"):
        rows = [row[0] for row in markdown.table("docs/compatibility.md", section)]
        assert any(row.startswith(f"kserve {version},") for row in rows)
