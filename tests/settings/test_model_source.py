"""What a uri can name: folders, GGUF files, hub ids, embedded models; and the error if it names nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.model_source import ModelSource, resolve_source


@pytest.mark.parametrize(
    ("uri", "kind", "location"),
    [
        ("org/name", "hub", "org/name"),
        ("hf://org/name", "hub", "org/name"),
        ("hf://gpt2", "hub", "gpt2"),
        ("embedded://smollm2-135m-instruct", "embedded", "smollm2-135m-instruct"),
    ],
)
def test_names_that_are_no_paths(uri: str, kind: str, location: str) -> None:
    source = resolve_source(uri)
    assert (source.kind, source.location) == (kind, location)


def test_a_folder_with_a_config_is_a_model(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "model.gguf"):
        (tmp_path / name).touch()
    expected = ModelSource("folder", str(tmp_path))
    assert resolve_source(str(tmp_path)) == resolve_source(f"file://{tmp_path}") == expected


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert resolve_source(str(tmp_path)) == resolve_source(str(tmp_path / "a.gguf"))
    assert resolve_source(str(tmp_path)).name == "a"
    (tmp_path / "config.json").touch()  # as in some repositories of GGUF files
    assert resolve_source(str(tmp_path)).name == "a"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(SettingsError, match=r"several .gguf files .*\(a.gguf, b.gguf\): name one"):
        resolve_source(str(tmp_path))


def test_relative_paths_start_at_the_settings_then_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("settings/near", "work/near", "work/far"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").touch()
    monkeypatch.chdir(tmp_path / "work")
    assert resolve_source("near", str(tmp_path / "settings")).location == str(tmp_path / "settings/near")
    assert resolve_source("./far", str(tmp_path / "settings")).location == str(tmp_path / "work/far")
    assert resolve_source("near").location == str(tmp_path / "work/near")


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("/nowhere/at/all", "no such file or folder: /nowhere/at/all"),
        ("./nowhere", "no such file or folder"),
        ("models/missing.gguf", "no such file or folder"),
        ("s3://bucket/model", "unknown scheme"),
        ("hf://", "not a hub id"),
        ("hf://a/b/c", "not a hub id"),
    ],
)
def test_what_names_nothing_says_so(uri: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        resolve_source(uri)


def test_an_empty_folder_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"expected config.json or one .gguf file; set parameters.uri"):
        resolve_source(str(tmp_path))


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(SettingsError, match=r"neither a folder nor a .gguf file"):
        resolve_source(str(tmp_path / "model.bin"))


def test_a_local_model_lies_in_a_root_of_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither dots nor a symbolic link lead out of the root; other kinds of model names are no paths."""
    for folder in ("allowed/model", "allowed-not"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").touch()
    (tmp_path / "allowed/link").symlink_to(tmp_path / "allowed-not")
    monkeypatch.setenv("MLSERVER_TORCH_STREAM_MODEL_ROOTS", f"/nowhere:{tmp_path / 'allowed'}")
    assert resolve_source("model", str(tmp_path / "allowed")).kind == "folder"
    for uri in (str(tmp_path / "allowed-not"), "../../allowed-not", f"file://{tmp_path / 'allowed/link'}"):
        with pytest.raises(SettingsError, match=r"is not in any folder of MLSERVER_TORCH_STREAM_MODEL_ROOTS"):
            resolve_source(uri, str(tmp_path / "allowed/model"))
    assert resolve_source("org/name").kind == "hub"
