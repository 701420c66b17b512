"""``import-mar``: what it writes is served, what it cannot carry over is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlserver_torch_stream.cli import main
from mlserver_torch_stream.torchserve.archive import open_archive
from tests.torchserve.workshop import HELLO, write_handler, write_mar

_YAML = "minWorkers: 1\nmaxWorkers: 4\nuseVenv: true\nhandler: {mine: 1}\n"
_MODEL = {
    "modelName": "hello",
    "modelVersion": "1.0",
    "handler": "hello.py",
    "configFile": "config.yaml",
    "requirementsFile": "requirements.txt",
}


def test_an_archive_becomes_a_folder_and_what_is_not_honoured_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mar = write_mar(tmp_path / "h.mar", {"hello.py": HELLO, "config.yaml": _YAML, "requirements.txt": "x"}, _MODEL)
    assert main(["import-mar", mar, "--into", str(tmp_path / "models")]) == 0
    folder = tmp_path / "models/hello"
    settings = json.loads((folder / "model-settings.json").read_text())
    assert settings == {
        "name": "hello",
        "implementation": "mlserver_torch_stream.TorchServeRuntime",
        "parameters": {"uri": "./h.mar", "version": "1.0"},
    }
    archive = open_archive(settings["parameters"]["uri"], str(folder))
    assert archive.handler == "hello.py"
    archive.close()
    said = capsys.readouterr().out
    for named in ("useVenv", "maxWorkers", "requirements.txt", str(folder)):
        assert named in said
    assert "mine" not in said


def test_a_bare_handler_stays_where_it_is_and_a_built_in_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = write_handler(tmp_path, HELLO) + ":handle"
    assert main(["import-mar", uri, "--into", str(tmp_path), "--name", "bare"]) == 0
    assert json.loads((tmp_path / "bare/model-settings.json").read_text())["parameters"] == {"uri": uri}
    mar = write_mar(tmp_path / "b.mar", {}, {"modelName": "built-in", "handler": "image_classifier"})
    assert main(["import-mar", mar, "--into", str(tmp_path)]) == 0
    assert "mlserver-torch-stream[torchserve]" in capsys.readouterr().out


def test_what_is_wrong_is_said_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = write_mar(
        tmp_path / "w.mar", {"config.yaml": "batchSize: many"}, {"handler": "h.py", "configFile": "config.yaml"}
    )
    named = write_mar(tmp_path / "n.mar", {}, {"modelName": "../out", "handler": "h.py"})
    for uri, said in ((wrong, "batchSize"), (named, "no name for a model"), (str(tmp_path / "none.mar"), "no such")):
        assert main(["import-mar", uri, "--into", str(tmp_path / "models")]) == 1
        assert said in capsys.readouterr().err
    assert not (tmp_path / "models").exists()
    write_mar(tmp_path / "ok.mar", {}, {"modelName": "ok", "handler": "h.py"})
    (tmp_path / "models/ok").mkdir(parents=True)
    assert main(["import-mar", str(tmp_path / "ok.mar"), "--into", str(tmp_path / "models")]) == 1
