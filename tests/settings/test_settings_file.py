"""Settings files: an error names the file, the line and the key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mlserver.settings import ModelSettings, Settings
from pydantic import ValidationError

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.server.lifecycle.unreadable_model import complaint, readable_or_not
from mlserver_torch_stream.server.server_settings import check_server_settings
from mlserver_torch_stream.settings_file import place_of_error, read_settings_file, refuse_stray_keys


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "chat").mkdir()
    return tmp_path / "chat" / "model-settings.json"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{\n  "name": "chat",\n}', ", line 3, column 1: a comma before '}'"),
        ('{\n  "versions": ["a",\n  ]}', ", line 3, column 3: a comma before ']'"),
        ('{\n  "name" "chat"\n}', ", line 2, column 10: not JSON: "),
        ('{"name": "chat"', "the file ends before its JSON object does"),
        ("", ": is empty"),
        (" \n", ": is empty"),
        ("[1]", ": must contain a JSON object, not [1]"),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}", ": is not UTF-8"),
    ],
)
def test_what_is_no_json_object_is_named_with_its_line(file: Path, text: str, says: str) -> None:
    file.write_text(text, encoding="latin-1")
    with pytest.raises(SettingsError, match=f"^{re.escape(str(file))}.*{re.escape(says)}"):
        read_settings_file(file)


def test_a_key_that_mlserver_would_ignore_is_sent_to_its_place_or_to_its_neighbour(file: Path) -> None:
    file.write_text('{\n  "name": "chat",\n  "max_num_seqs": 8\n}')
    with pytest.raises(SettingsError, match=r"settings\.json, line 3: 'max_num_seqs' belongs in parameters\.extra"):
        refuse_stray_keys(file, ["name"], {"max_num_seqs": "parameters.extra"})
    file.write_text('{\n  "nme": "chat"\n}')
    with pytest.raises(SettingsError, match=r"settings\.json, line 2: unknown key 'nme'; did you mean 'name'"):
        refuse_stray_keys(file, ["name"], {})
    file.write_text('{"_comment": "of the team", "description": "a chat model"}')
    refuse_stray_keys(file, [*ModelSettings.model_fields], {"uri": "parameters"})


def test_the_place_of_an_error_is_the_line_of_its_key_in_the_file(file: Path) -> None:
    file.write_text('{\n  "parameters": {\n    "uri": "x",\n    "extra": {\n      "dtyp": 1, "threads": 0}}}')
    for message, line in (
        ("parameters.extra: unknown key 'dtyp'; did you mean 'dtype'?", 5),
        ("parameters.extra.threads: must be above 0", 5),
        ("parameters.uri: no such file", 3),
    ):
        assert place_of_error(SettingsError(message), str(file)) == f" ({file}, line {line})"
    for message in ("parameters.device_map: from elsewhere", "MLSERVER_MODEL_EXTRA: not JSON"):
        assert place_of_error(SettingsError(message), str(file)) == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"implementation": "x.Y",\n "parameters": []}', ", line 2: parameters: Input should be "),
        (
            '{"implementation": "x.Y", "parameters":\n {"extra": "dtype"}}',
            ", line 2: parameters.extra: Input should be",
        ),
        ('{"name": "chat"}', ": implementation is missing"),
        (
            '{"implementation":\n "mlserver_torch_stream.TorchStreamRuntim"}',
            ", line 1: no runtime mlserver_torch_stream.TorchStreamRuntim; did you mean "
            "mlserver_torch_stream.TorchStreamRuntime?",
        ),
        (
            '{"implementation": "mlserver_torch_strean.TorchServeRuntime"}',
            ", line 1: no runtime mlserver_torch_strean.TorchServeRuntime; did you mean "
            "mlserver_torch_stream.TorchServeRuntime?",
        ),
        ('{"implementation": "mlserver_torch_stream"}', ", line 1: no runtime mlserver_torch_stream; "),
    ],
)
def test_a_model_whose_settings_mlserver_cannot_read_says_why(file: Path, text: str, says: str) -> None:
    file.write_text(text)
    settings = readable_or_not(file)
    assert settings.name == "chat" and settings.implementation_.endswith(".UnreadableModel")
    assert settings.parameters is not None and settings.parameters.extra is not None
    assert f"{file}{says}" in settings.parameters.extra["why"]


def test_settings_that_can_be_read_are_mlservers_own(file: Path) -> None:
    file.write_text('{"implementation": "other.Runtime", "anything": 1}')
    settings = readable_or_not(file)
    assert (settings.name, settings.implementation_) == ("chat", "other.Runtime")
    assert settings._source == str(file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{\n "http_port": "eighty"}', r"settings\.json, line 2: http_port: .*'eighty'"),
        ('{\n "grpc_port": 70000}', r"settings\.json, line 2: grpc_port: must be a port, 0 to 65535, got 70000"),
        ('{\n "paralel_workers": 0}', r"line 2: unknown key 'paralel_workers'; did you mean 'parallel_workers'\?"),
        ('{\n "max_num_seqs": 8}', r"line 2: 'max_num_seqs' belongs in parameters\.extra of model-settings\.json"),
        ('{\n "implementation": "x"}', r"line 2: 'implementation' belongs in model-settings\.json"),
        ('{"debug": false,}', r"settings\.json, line 1, column 17: a comma before"),
    ],
)
def test_server_settings_that_are_wrong_are_named_with_their_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(SettingsError, match=says):
        check_server_settings(tmp_path)


def test_a_variable_of_mlservers_that_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_server_settings(tmp_path)
    monkeypatch.setenv("MLSERVER_METRICS_PORT", "many")
    with pytest.raises(SettingsError, match=r"^MLSERVER_METRICS_PORT: .*'many'"):
        check_server_settings(tmp_path)


def test_a_complaint_names_the_first_wrong_key(file: Path) -> None:
    file.write_text('{"debug": "perhaps"}')
    with pytest.raises(ValidationError) as error:
        Settings.model_validate({"debug": "perhaps"})
    assert complaint(error.value, file).startswith(f"{file}, line 1: debug: ")
