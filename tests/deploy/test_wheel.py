"""The wheel, installed away from the checkout: its command serves a model, and the request that it prints streams."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from tests import markdown
from tests.server.harness import free_ports

_BUILD_S = 300.0
_READY_S = 180.0
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of an environment with the wheel, and with this one's packages but for the package.

    Those are found by plain lines of a path file, in which an editable installation of the checkout does not count.
    """
    folder = tmp_path_factory.mktemp("wheel")
    build = [*_PIP, "wheel", "--no-deps", "--wheel-dir", str(folder), str(markdown.ROOT)]
    subprocess.run(build, check=True, timeout=_BUILD_S)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True, timeout=60)
    (wheel,) = folder.glob("*.whl")
    python = folder / "env" / "bin" / "python"
    subprocess.run([*_PIP, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages") and Path(path) != site]
    (site / "others.pth").write_text("\n".join([*others, sysconfig.get_path("purelib")]) + "\n")
    where = "import mlserver_torch_stream as package; print(package.__file__)"
    found = subprocess.run([python, "-c", where], cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    assert Path(found.stdout.strip()).is_relative_to(site)
    return python.parent


@pytest.mark.slow
def test_the_installed_command_serves_a_model_and_prints_a_request_that_streams(
    installed: Path, tiny_model: Path, tmp_path: Path
) -> None:
    ports = dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True))
    options = [word for role, port in ports.items() for word in (f"--{role}-port", str(port))]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MLSERVER_", "PYTHONPATH"))}
    environment["MLSERVER_TORCH_STREAM_FAULTS"] = "decode:1:slow=0.02"  # so fast a model answers in one event
    log = tmp_path / "log"
    with log.open("wb") as sink:
        command = [str(installed / "mlserver-torch-stream"), "serve", str(tiny_model), "--name", "tiny", *options]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=sink, stderr=sink)
    try:
        end = time.monotonic() + _READY_S
        while "tiny is ready" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        printed = re.search(r"^  (curl .*)$", log.read_text(), re.MULTILINE)
        assert printed is not None
        answer = subprocess.run(shlex.split(printed[1]), capture_output=True, text=True, check=True, timeout=60)
        assert answer.stdout.count("data: ") > 1
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    assert "parallel_workers" not in log.read_text()  # the defaults suit streams: nothing to warn of
