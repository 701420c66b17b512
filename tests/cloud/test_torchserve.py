"""Objects posted to TorchServe 0.12 itself, if Java is installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlserver_torch_stream.free_port import free_port
from tests import plain_http
from tests.cloud.command import cloud, trouble
from tests.cloud.handlers import COUNT, counted, predictions, rows, told
from tests.torchserve.workshop import write_mar
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("java") is None, reason="Java, which runs TorchServe, is not installed"),
]
_HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def torchserve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("torchserve")
    (folder / "store").mkdir()
    model = {"modelName": "m", "handler": "handler.py", "modelVersion": "1.0"}
    write_mar(folder / "store/m.mar", {"handler.py": COUNT}, model)
    ports = {name: free_port(_HOST) for name in ("inference", "management", "metrics", "grpc_i", "grpc_m")}
    lines = [f"{name}_address=http://{_HOST}:{ports[name]}" for name in ("inference", "management", "metrics")]
    lines += [f"grpc_inference_port={ports['grpc_i']}", f"grpc_management_port={ports['grpc_m']}"]
    lines += ["disable_token_authorization=true", "default_workers_per_model=1"]
    (folder / "config.properties").write_text("\n".join(lines))
    options = ["--ts-config", "config.properties", "--model-store", "store", "--models", "m=m.mar"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ts.model_server", "--foreground", "--ncs", *options],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        start_new_session=True,
    )
    url = f"http://{_HOST}:{ports['inference']}"
    try:
        wait_until(lambda: _answers(url), "TorchServe answers", seconds=180)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        return plain_http.post(f"{url}/predictions/m", content=b"x", timeout=30.0).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def objects(tmp_path: Path) -> dict[str, bytes]:
    found = {"a b.png": bytes(range(256)) * 9, "b.bin": b"pieces" * 200, "c.bin": b"fail", "t.txt": b"text"}
    (tmp_path / "in").mkdir()
    for key, body in found.items():
        (tmp_path / "in" / key).write_bytes(body)
    return found


def test_torchserve_gets_objects_and_chunks_and_its_pieces_come_back(
    torchserve: str, objects: dict[str, bytes], tmp_path: Path, capfd: Any
) -> None:
    run = ("run", "--input", tmp_path / "in", "--url", torchserve, "--api", "torchserve", "--model", "m")
    assert cloud(*run, "--chunk-bytes", "1200", "--rows", "piece") == 1
    found = rows(capfd.readouterr().out)
    assert [(row["custom_id"], row.get("piece", {}).get("index")) for row in found] == [
        *(("a b.png#0", 0), ("a b.png#1", 0)),
        *(("b.bin#0", 0), ("b.bin#0", 1), ("b.bin#0", 2)),
        *(("c.bin#0", None), ("t.txt#0", 0)),
    ]
    assert told([predictions(row)[0] for row in found[:2]]) == counted("a%20b.png", objects["a b.png"], 1200)
    failed = trouble(found[5])
    assert failed is not None and "answered 503" in failed["message"]


def test_a_model_that_torchserve_does_not_have_ends_the_run(
    torchserve: str, objects: dict[str, bytes], tmp_path: Path, capfd: Any
) -> None:
    run = ("run", "--input", tmp_path / "in", "--url", torchserve, "--api", "torchserve", "--model")
    for model in ("other", "m/9"):
        assert cloud(*run, model) == 3
        assert "answered 404: Model" in capfd.readouterr().err
