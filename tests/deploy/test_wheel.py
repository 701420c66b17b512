"""The wheels, installed outside the checkout: their command serves a model and prints a request that streams."""

from __future__ import annotations

import os
import platform
import re
import runpy
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlserver_torch_stream.engine.native.kernel_variants import VARIANTS, runnable
from mlserver_torch_stream.server.page.page_routes import page_files
from tests import markdown, plain_http
from tests.server.harness import free_ports

_BUILD_S = 300.0
_COMPILED_S = 3600.0
_READY_S = 180.0
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def install(wheel: Path, folder: Path) -> Path:
    """Installs the wheel in an environment, and returns the folder of its commands.

    The environment shares all packages of this one except the package itself. They are found by the plain lines of a
    path file, which ignore an editable installation of the checkout.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True, timeout=60)
    python = folder / "env" / "bin" / "python"
    subprocess.run([*_PIP, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages") and Path(path) != site]
    (site / "others.pth").write_text("\n".join([*others, sysconfig.get_path("purelib")]) + "\n")
    where = "import mlserver_torch_stream as package; print(package.__file__)"
    found = subprocess.run([python, "-c", where], cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    assert Path(found.stdout.strip()).is_relative_to(site)
    return python.parent


@contextmanager
def served(commands: Path, model: Path, folder: Path, **environment: str) -> Iterator[Path]:
    """Runs the installed command, which serves the model as ``tiny`` until the block ends, and yields its log."""
    ports = dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True))
    options = [word for role, port in ports.items() for word in (f"--{role}-port", str(port))]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MLSERVER_", "PYTHONPATH"))}
    log = folder / "log"
    with log.open("wb") as sink:
        command = [str(commands / "mlserver-torch-stream"), "serve", str(model), "--name", "tiny", *options]
        process = subprocess.Popen(command, cwd=folder, env={**inherited, **environment}, stdout=sink, stderr=sink)
    try:
        end = time.monotonic() + _READY_S
        while "tiny is ready" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield log
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


_STANDS_IN = "import pathlib, sys; pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).touch()"


def test_the_build_of_a_wheel_says_what_it_does_before_it_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Stand-ins replace the compiler, which takes minutes, and the base class, which is not installed for tests."""
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang/__main__.py").write_text(_STANDS_IN)
    interface = ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = {Any: object}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WHEEL_MACHINE", "x86_64")
    (tmp_path / "mlserver_torch_stream").symlink_to(markdown.ROOT / "mlserver_torch_stream")
    hook = runpy.run_path(str(markdown.ROOT / "hatch_build.py"))["KernelsHook"]()
    hook.root = str(tmp_path)
    hook.initialize("standard", {"force_include": {}})
    said = capfd.readouterr().out.splitlines()
    ours = [each.name for each in VARIANTS if each.machine == "x86_64"]
    assert len(said) == len(ours)
    for number, (line, name) in enumerate(zip(said, ours, strict=True), start=1):
        assert line.startswith(f"Compiling the kernels for x86_64 with {name}, {number} of {len(ours)}")
    make = [
        "make",
        "-n",
        "-C",
        str(markdown.ROOT),
        "wheel",
        f"VENV={tmp_path}",
        "WHEEL_MACHINES=aarch64",
        "PYTHON=python3",
    ]
    commands = subprocess.run(make, capture_output=True, text=True, check=True, timeout=60).stdout
    for said_first, then in (
        ("echo 'Installing a compiler", "-m venv"),
        ("echo 'Building", "--sdist"),
        ('echo "Building', "--wheel"),
    ):
        assert 0 <= commands.index(said_first) < commands.index(then)


@pytest.mark.slow
def test_the_installed_command_serves_a_model_and_prints_a_request_that_streams(
    tiny_model: Path, tmp_path: Path
) -> None:
    build = [*_PIP, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(markdown.ROOT)]
    subprocess.run(build, check=True, timeout=_BUILD_S)
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    slow = {"MLSERVER_TORCH_STREAM_FAULTS": "decode:1:slow=0.02"}  # so fast a model answers in one event
    with served(install(wheel, tmp_path), tiny_model, tmp_path, **slow) as log:
        printed = re.search(r"^  (curl .*)$", log.read_text(), re.MULTILINE)
        assert printed is not None
        answer = subprocess.run(shlex.split(printed[1]), capture_output=True, text=True, check=True, timeout=60)
        assert answer.stdout.count("data: ") > 1
        opened = re.search(r"^Open (\S+/) to chat", log.read_text(), re.MULTILINE)
        assert opened is not None
        for path, file in page_files().items():
            assert plain_http.get(opened[1].rstrip("/") + path, timeout=10).content == file.content
    assert "parallel_workers" not in log.read_text()  # the defaults suit streams: nothing to warn of


@pytest.mark.slow
@pytest.mark.skipif(not runnable(), reason="there are no kernels compiled ahead for this CPU")
def test_a_wheel_for_this_machine_has_kernels_and_needs_no_compiler(tiny_model: Path, tmp_path: Path) -> None:
    """Takes minutes: each variant is compiled, together with the compiler's C++ library for it."""
    best, machine = runnable()[0].name, platform.machine()
    build = ["make", "-C", str(markdown.ROOT), "wheel", f"WHEEL_MACHINES={machine}", f"WHEEL_DIR={tmp_path}"]
    subprocess.run(build, check=True, timeout=_COMPILED_S)
    (wheel,) = tmp_path.glob(f"*-py3-none-manylinux_2_28_{machine}.whl")
    commands = install(wheel, tmp_path)
    alone = {"PATH": str(commands), "MLSERVER_TORCH_STREAM_CACHE": str(tmp_path / "cache")}
    with served(commands, tiny_model, tmp_path, **alone) as log:
        assert f"our own kernels ({best}, prebuilt)" in log.read_text()
    assert not list((tmp_path / "cache").glob("kernels/*"))
