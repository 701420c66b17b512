"""``import-mar``: MLServer serves what it writes, and it names what it cannot carry over."""

from __future__ import annotations

import json
import resource
import signal
import zipfile
from pathlib import Path

import pytest

from mlserver_torch_stream.cli import main
from mlserver_torch_stream.handlers.config.archive import open_archive
from tests.torchserve.workshop import HELLO, write_handler, write_mar

_YAML = "minWorkers: 1\nmaxRetryTimeoutInSec: 4\nuseVenv: true\nhandler: {mine: 1}\n"
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
    for named in ("useVenv", "maxRetryTimeoutInSec", "requirements.txt", str(folder)):
        assert named in said
    assert "mine" not in said


def test_an_archive_without_a_name_is_called_as_its_file_or_folder_is(tmp_path: Path) -> None:
    mar = write_mar(tmp_path / "hello.v2.mar", {"hello.py": HELLO}, {"handler": "hello.py"})
    folder = tmp_path / "unpacked"
    with zipfile.ZipFile(mar) as archive:
        archive.extractall(folder)
    for uri, name in ((mar, "hello.v2"), (f"{folder}/", "unpacked")):
        assert main(["import-mar", uri, "--into", str(tmp_path / "models")]) == 0
        assert json.loads((tmp_path / f"models/{name}/model-settings.json").read_text())["name"] == name


def test_properties_without_a_bottom_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mar = write_mar(tmp_path / "h.mar", {"hello.py": HELLO}, {"modelName": "hello", "handler": "hello.py"})
    (tmp_path / "config.properties").write_text("models=" + "[" * 100_000)
    assert main(["import-mar", mar, "--properties", str(tmp_path / "config.properties")]) == 1
    assert "config.properties: models: must be a JSON object" in capsys.readouterr().err


def test_bounds_of_what_an_archive_unpacks_to_hold_for_the_import_and_go_along_with_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"modelName": "hello", "handler": "hello.py"}
    mar = write_mar(tmp_path / "h.mar", {"hello.py": HELLO}, model)
    command = ["import-mar", mar, "--into", str(tmp_path / "models"), "--max-unpacked-bytes", "100000"]
    assert main([*command, "--max-unpacked-files", "2"]) == 1
    assert "more than 2 files and folders" in capsys.readouterr().err
    assert main([*command, "--max-unpacked-files", "20"]) == 0
    settings = json.loads((tmp_path / "models/hello/model-settings.json").read_text())
    assert settings["parameters"]["extra"] == {"maxUnpackedBytes": 100_000, "maxUnpackedFiles": 20}


def test_a_bare_handler_stays_where_it_is_and_a_built_in_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = write_handler(tmp_path, HELLO) + ":handle"
    assert main(["import-mar", uri, "--into", str(tmp_path), "--name", "bare"]) == 0
    assert json.loads((tmp_path / "bare/model-settings.json").read_text())["parameters"] == {"uri": uri}
    mar = write_mar(tmp_path / "b.mar", {}, {"modelName": "built-in", "handler": "image_classifier"})
    assert main(["import-mar", mar, "--into", str(tmp_path)]) == 0
    assert "mlserver-torch-stream[torchserve-handlers]" in capsys.readouterr().out
    mar = write_mar(tmp_path / "n.mar", {}, {"modelName": "none", "handler": "nowhere"})
    assert main(["import-mar", mar, "--into", str(tmp_path)]) == 0
    assert "neither the archive nor TorchServe has it" in capsys.readouterr().out


def test_what_is_wrong_is_said_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = write_mar(
        tmp_path / "w.mar", {"config.yaml": "batchSize: many"}, {"handler": "h.py", "configFile": "config.yaml"}
    )
    named = write_mar(tmp_path / "n.mar", {}, {"modelName": "../out", "handler": "h.py"})
    steering = write_mar(tmp_path / "s.mar", {}, {"modelName": "s", "handler": "h.py", "configFile": "\x9b2J"})
    for uri, said in (
        (wrong, "batchSize"),
        (named, "not a valid name for a model"),
        (steering, "cannot read \\x9b2J: "),
        (str(tmp_path / "none.mar"), "error: no such archive"),
    ):
        assert main(["import-mar", uri, "--into", str(tmp_path / "models")]) == 1
        assert said in capsys.readouterr().err
    assert not (tmp_path / "models").exists()


def _mar(tmp_path: Path, name: str, version: str) -> str:
    return write_mar(tmp_path / name, {"h.py": HELLO}, {"modelName": "ok", "modelVersion": version, "handler": "h.py"})


def _files(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_a_folder_that_is_there_is_named_with_what_to_do_and_only_replaced_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files in it that the command has not written are never removed."""
    models = tmp_path / "models"
    assert main(["import-mar", _mar(tmp_path, "a.mar", "1.0"), "--into", str(models)]) == 0
    (models / "ok/mine.txt").write_text("mine")
    before = _files(models)
    newer = _mar(tmp_path, "b.mar", "2.0")
    assert main(["import-mar", newer, "--into", str(models)]) == 1
    said = capsys.readouterr().err
    assert all(part in said for part in (str(models / "ok"), "--force", "--name", "--into")), said
    assert _files(models) == before
    assert main(["import-mar", newer, "--into", str(models), "--force"]) == 0
    after = _files(models)
    assert after["ok/b.mar"] == Path(newer).read_bytes() and after["ok/mine.txt"] == b"mine"
    assert json.loads(after["ok/model-settings.json"])["parameters"] == {"uri": "./b.mar", "version": "2.0"}


def test_force_replaces_no_file_by_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/ok").write_text("a file")
    assert main(["import-mar", _mar(tmp_path, "a.mar", "1"), "--into", str(tmp_path / "models"), "--force"]) == 1
    assert str(tmp_path / "models/ok") in capsys.readouterr().err
    assert _files(tmp_path / "models") == {"ok": b"a file"}


@pytest.mark.parametrize("there", [False, True])
def test_what_cannot_be_written_whole_is_not_written_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    """The disk is full when the archive has been copied in part; a limit on the process's file size simulates this."""
    models = tmp_path / "models"
    if there:
        assert main(["import-mar", _mar(tmp_path, "a.mar", "1"), "--into", str(models)]) == 0
    before = _files(models)
    larger = Path(_mar(tmp_path, "a.mar", "2"))
    larger.write_bytes(b"\0" * 100_000 + larger.read_bytes())  # what comes before a zip is no matter to its readers
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handled = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        assert main(["import-mar", str(larger), "--into", str(models), "--force"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handled)
    assert "File too large" in capsys.readouterr().err
    assert _files(models) == before and not list(models.glob(".*"))


def test_what_config_properties_says_of_a_model_goes_along_and_the_rest_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    properties = tmp_path / "config.properties"
    properties.write_text("default_response_timeout=30\nkeystore=k.p12\n")
    command = ["import-mar", _mar(tmp_path, "a.mar", "1.0"), "--into", str(tmp_path), "--properties", str(properties)]
    assert main(command) == 0
    written = json.loads((tmp_path / "ok/model-settings.json").read_text())
    assert written["parameters"]["extra"] == {"responseTimeout": 30}
    said = capsys.readouterr().out
    assert "carried over from config.properties: responseTimeout: 30" in said
    assert (
        "not carried over from config.properties: keystore: the environment: MLSERVER_TORCH_STREAM_TLS_CERT_FILE"
        in said
    )
    properties.write_text("default_response_timeout=-1")
    assert main([*command, "--name", "wrong"]) == 1
    assert "responseTimeout" in capsys.readouterr().err and not (tmp_path / "wrong").exists()
    properties.unlink()
    assert main([*command, "--name", "wrong"]) == 1
    assert str(properties) in capsys.readouterr().err
