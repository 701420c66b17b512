"""Workers with their own interpreter: one without any package, and each Python version that handlers may use."""

from __future__ import annotations

import ast
import asyncio
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from mlserver.settings import ModelParameters, ModelSettings

from mlserver_torch_stream.cli import main
from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.handlers.config.worker_settings import OLDEST, find_interpreter, not_installed
from mlserver_torch_stream.handlers.pool.handler_request import HandlerFailed
from mlserver_torch_stream.handlers.runtime.build import build
from tests.torchserve.workshop import HELLO, ask, outcome, request, run, running, write_handler, write_mar

_TORCHSERVE = Path(__file__).parent.parent.parent / "mlserver_torch_stream/handlers"
_WORKER_SIDE = [_TORCHSERVE / "frames.py", *sorted((_TORCHSERVE / "worker").glob("*.py"))]
_SHIM = sorted((_TORCHSERVE / "shim").rglob("*.py"))
_OWN = ("mlserver_torch_stream.handlers.worker", "mlserver_torch_stream.handlers.frames")
# What parts of the stand-in use that a handler imports together with these.
_WITH_THE_HANDLER = {"numpy", "torch", "transformers", "yaml"}


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(), feature_version=OLDEST)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("path", [*_WORKER_SIDE, *_SHIM], ids=lambda path: str(path.relative_to(_TORCHSERVE)))
def test_the_workers_side_imports_the_standard_library_alone(path: Path) -> None:
    allowed = {*sys.stdlib_module_names, "ts", *(_WITH_THE_HANDLER if path in _SHIM else ())}
    foreign = [name for name in _imports(path) if name.partition(".")[0] not in allowed and not name.startswith(_OWN)]
    assert not foreign


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter without any package."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    return str(folder / "bin/python")


_HANDLER = """
import asyncio, importlib.util, os, sys
from ts.context import Context
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.metrics.metric_type_enum import MetricTypes
from ts.utils.util import map_class_to_label

def facts(context):
    return {
        "executable": sys.executable,
        "version": sys.version_info[:2],
        "found": [name for name in ("numpy", "torch", "transformers", "yaml") if importlib.util.find_spec(name)],
        "path": os.environ.get("PYTHONPATH"),
        "yaml": str(context.model_yaml_config.get("since")),
        "mapped": map_class_to_label([[0.5]], {"0": "cat"}),
    }

def answer(data, context):
    if data is None:
        return None
    context.metrics.get_metric("HandlerTime", MetricTypes.GAUGE).add_or_update(1, [context.model_name, "Model"])
    send_intermediate_predict_response(["hello"] * len(data), context.request_ids, "ok", 200, context)
    if data[0]["body"] == b"raise":
        raise ValueError("asked to")
    if context.stopping_criteria is None and context.model_yaml_config.get("continuousBatching"):
        context.stopping_criteria = [lambda value: True for _ in data]
    return [facts(context)] * len(data)
"""
_ASYNCHRONOUS = f"""
{_HANDLER}

class Handler:
    def initialize(self, context): ...

    async def handle(self, data, context):
        await asyncio.sleep(0)
        return answer(data, context)
"""


def _answers(folder: Path, python: str, **config: Any) -> dict[str, Any]:
    """Returns what a handler reports of its interpreter.

    The handler sends a piece, and a request fails alone, as with the server's own interpreter.
    """
    source = _ASYNCHRONOUS if "asyncCommunication" in config else f"{_HANDLER}\nhandle = answer"
    uri = write_handler(folder, source, {"since": date(2024, 5, 6), **config})  # YAML has dates, and JSON has none

    async def scenario() -> dict[str, Any]:
        async with running(uri, "auto", {"python": python}) as pool:
            failed = await outcome(pool.submit(request("raise")))
            assert isinstance(failed, HandlerFailed) and "asked to" in failed.message
            ahead, last = await ask(pool)
            assert ahead == "hello" and ("HandlerTime", "gauge") in {key[:2] for key in pool.metrics.own}
            return dict(json.loads(last))

    return run(scenario())


@pytest.mark.parametrize("mode", [{}, {"asyncCommunication": True}, {"continuousBatching": True}], ids=str)
def test_a_bare_interpreter_runs_a_handler_and_sees_no_package_of_the_servers(
    tmp_path: Path, bare: str, mode: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(json.__file__).parent))
    found = _answers(tmp_path, bare, **mode)
    assert found["executable"] == bare and found["found"] == [] and found["path"] is None
    assert found["yaml"] == "2024-05-06" and found["mapped"] == [{"cat": 0.5}]


@pytest.mark.long
@pytest.mark.parametrize("minor", [8, 9, 10, 11, 12, 13])
def test_each_python_from_the_oldest_on_runs_a_handler(tmp_path: Path, minor: int) -> None:
    python = shutil.which(f"python3.{minor}")
    if python is None or subprocess.run([python, "-V"], capture_output=True).returncode:
        pytest.skip(f"there is no python3.{minor} here")
    for mode in ({}, {"asyncCommunication": True}, {"continuousBatching": True}):
        assert _answers(tmp_path / str(mode), python, **mode)["version"] == [3, minor]


def test_an_interpreter_is_found_beside_the_settings_and_stays_a_link(tmp_path: Path, bare: str) -> None:
    (tmp_path / "venv").symlink_to(Path(bare).parent.parent)
    assert find_interpreter("venv/bin/python", str(tmp_path)) == str(tmp_path / "venv/bin/python")
    assert find_interpreter(bare, str(tmp_path)) == bare


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (None, "no such interpreter: python"),
        ("#!/bin/sh\necho 3 7", "handlers need Python 3.8 or later: it is Python 3.7"),
        ("#!/bin/sh\necho broken >&2; exit 3", "handlers need Python 3.8 or later: broken"),
        ("#!/bin/sh\necho hello", "cannot be run as a Python interpreter"),
        ("no program", "cannot be run as a Python interpreter"),
    ],
)
def test_an_interpreter_that_is_not_there_or_too_old_is_named(tmp_path: Path, program: str | None, said: str) -> None:
    if program is not None:
        (tmp_path / "python").write_text(program)
        (tmp_path / "python").chmod(0o755)
    with pytest.raises(SettingsError, match=f"parameters.extra.python: .*{said}"):
        find_interpreter("python", str(tmp_path))


# --- requirements: named with the line that installs them, and never installed ---

_MODEL = {"modelName": "m", "handler": "h.py", "configFile": "c.yaml", "requirementsFile": "requirements.txt"}


def _mar(folder: Path, yaml: str) -> str:
    files = {"h.py": HELLO, "c.yaml": yaml, "requirements.txt": "transformers==4.44.2\n"}
    return write_mar(folder / "m.mar", files, _MODEL)


def _build(uri: str, **extra: Any) -> None:
    """Builds the model until it is refused."""
    parameters = ModelParameters(uri=uri, extra={"ts": "shim", **extra})
    settings = ModelSettings(name="m", implementation="mlserver_torch_stream.TorchServeRuntime", parameters=parameters)

    async def scenario() -> None:
        built = await asyncio.to_thread(build, settings, asyncio.get_running_loop())
        await asyncio.to_thread(built.shutdown)

    run(scenario())


def test_use_venv_is_refused_with_the_line_that_makes_one_until_an_interpreter_is_named(
    tmp_path: Path, bare: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = _mar(tmp_path, "useVenv: true")
    unpack = f"python3 -m zipfile -e {uri} unpacked"
    line = f"python3 -m venv venv && {unpack} && venv/bin/pip install torch -r unpacked/requirements.txt"
    with pytest.raises(SettingsError, match=r"useVenv: requirements\.txt is not installed") as refused:
        _build(uri)
    assert line in str(refused.value) and "parameters.extra.python" in str(refused.value)
    assert not caplog.records
    _build(uri, python=bare)
    assert not [record for record in caplog.records if "not installed" in record.getMessage()]
    _build(uri, useVenv=False)
    assert [record.levelname for record in caplog.records if line in record.getMessage()] == ["WARNING"]
    assert main(["import-mar", uri, "--into", str(tmp_path / "models")]) == 0
    assert line in capsys.readouterr().out


def test_the_line_is_one_that_a_shell_runs(tmp_path: Path) -> None:
    """Runs until pip would access the network."""
    (tmp_path / "pip").write_text('#!/bin/sh\ncat "$4"')
    (tmp_path / "pip").chmod(0o755)
    packed = Path(_mar(tmp_path, "useVenv: true"))
    folder = tmp_path / "a folder"
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(folder)
    with tarfile.open(tmp_path / "m.tar.gz", "w:gz") as archive:
        archive.add(folder, ".")
    for uri in (str(packed), f"file://{tmp_path}/m.tar.gz", str(folder)):
        line = not_installed("requirements.txt", uri, True).split("`")[1]
        ours = line.replace("python3 -m venv venv", "true").replace("venv/bin/pip", str(tmp_path / "pip"))
        done = subprocess.run(["sh", "-c", ours], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.stdout == "transformers==4.44.2\n", done.stderr
        shutil.rmtree(tmp_path / "unpacked", ignore_errors=True)


def test_without_requirements_there_is_nothing_that_a_venv_would_hold(tmp_path: Path) -> None:
    _build(write_handler(tmp_path, HELLO, {"useVenv": True}))
