"""What a uri can name, and what is refused before any of its code runs."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import stat
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from mlserver import ModelSettings
from mlserver.settings import ModelParameters

from mlserver_torch_stream import TorchServeRuntime
from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.handlers.config.archive import open_archive, read_named
from mlserver_torch_stream.handlers.config.unpacking import UnpackBounds
from mlserver_torch_stream.handlers.runtime.build import build
from tests.torchserve.workshop import HELLO, ask, run, running, write_handler, write_mar

_MODEL = {"modelName": "hello", "handler": "hello.py", "configFile": "model-config.yaml"}
_FILES = {"hello.py": HELLO, "model-config.yaml": "batchSize: 4\nhandler: {a: 1}\n", "deep/er/data.txt": "x"}


def _as_tar(path: Path, files: dict[str, str], model: dict[str, Any]) -> str:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {**files, "MAR-INF/MANIFEST.json": json.dumps({"model": model})}.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return str(path)


def _as_archiver_tgz(path: Path, files: dict[str, str], model: dict[str, Any]) -> str:
    """Writes an archive like ``torch-model-archiver --archive-format tgz``: all members are below the model's name."""
    manifest = {"MAR-INF/MANIFEST.json": json.dumps({"model": model})}
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {**files, **manifest}.items():
            info = tarfile.TarInfo(f"hello/{name}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return str(path)


def _as_windows_zip(path: Path, files: dict[str, str], model: dict[str, Any]) -> str:
    manifest = {"MAR-INF/MANIFEST.json": json.dumps({"model": model})}
    return write_mar(path, {name.replace("/", "\\"): text for name, text in {**files, **manifest}.items()})


def _as_folder(path: Path, files: dict[str, str], model: dict[str, Any]) -> str:
    for name, text in {**files, "MAR-INF/MANIFEST.json": json.dumps({"model": model})}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("hello.mar", write_mar),
        ("hello.tar.gz", _as_tar),
        ("hello.tar.gz", _as_archiver_tgz),
        ("hello.mar", _as_windows_zip),
        ("hello", _as_folder),
    ],
)
def test_an_archive_of_each_kind_is_served_and_leaves_nothing_behind(tmp_path: Path, name: str, write: Any) -> None:
    uri = write(tmp_path / name, _FILES, _MODEL)
    assert read_named(Path(uri), None) == ("hello", "1.0", {"batchSize": 4, "handler": {"a": 1}})
    archive = open_archive(uri, None)
    assert archive.yaml == {"batchSize": 4, "handler": {"a": 1}} and archive.handler == "hello.py"
    assert (archive.folder / "deep/er/data.txt").read_text().strip() == "x"
    archive.close()
    assert archive.folder.exists() == (not archive.own) == (name == "hello")
    assert archive.unpacked is None or not archive.unpacked.path.exists()

    async def scenario() -> None:
        async with running(uri) as pool:
            assert await ask(pool) == ["hello", "hello", "hello", "hello world "]

    run(scenario())


@pytest.mark.parametrize(
    ("files", "model", "said"),
    [
        ({}, None, "no MAR-INF/MANIFEST.json"),
        ({}, {"handler": 1}, "MAR-INF/MANIFEST.json: has no model.handler"),
        ({}, {"handler": "h.py", "configFile": "c.yaml"}, "cannot read c.yaml: No such file or directory"),
        ({"c.yaml": "[1]"}, {"handler": "h.py", "configFile": "c.yaml"}, "c.yaml: must be a mapping"),
    ],
)
def test_an_error_names_the_archive_and_not_the_folder_that_it_is_unpacked_into(
    tmp_path: Path, files: dict[str, str], model: dict[str, Any] | None, said: str
) -> None:
    uri = write_mar(tmp_path / "m.mar", files, model)
    with pytest.raises(LoadFailed) as raised:
        open_archive(uri, None)
    assert str(raised.value).startswith(f"{uri}: {said}") and "mlserver-torch-stream-mar-" not in str(raised.value)


def test_requirements_of_an_archive_are_named_where_unpacking_puts_them(tmp_path: Path) -> None:
    model = {**_MODEL, "requirementsFile": "requirements.txt"}
    files = {**_FILES, "requirements.txt": ""}
    for write, name in ((_as_tar, "requirements.txt"), (_as_archiver_tgz, "hello/requirements.txt")):
        archive = open_archive(write(tmp_path / "m.tar.gz", files, model), None)
        assert (archive.requirements, archive.packed_requirements) == ("requirements.txt", name)
        archive.close()


def test_a_bare_handler_and_a_function_in_it(tmp_path: Path) -> None:
    uri = write_handler(
        tmp_path, "def mine(data, context):\n    return None if data is None else [context.model_yaml_config['a']]"
    )
    (tmp_path / "model-config.yaml").write_text("a: from the yaml")

    async def scenario() -> None:
        async with running(f"{uri}:mine") as pool:
            assert await ask(pool) == ["from the yaml"]

    run(scenario())


def test_a_relative_uri_starts_at_the_settings_folder(tmp_path: Path) -> None:
    write_handler(tmp_path / "models", HELLO)
    assert open_archive("./models/handler.py", str(tmp_path)).folder == tmp_path / "models"


@pytest.mark.parametrize(
    "name",
    ["../outside.py", "/etc/outside", "a/../../outside", "..\\outside", "\\outside", "C:/outside", "C:\\outside"],
)
def test_a_path_that_escapes_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    for uri in (
        write_mar(tmp_path / "in/m.mar", {name: "x"}, _MODEL),
        _as_tar(tmp_path / "in/m.tar.gz", {name: "x"}, _MODEL),
    ):
        with pytest.raises(LoadFailed, match="leads out of the archive"):
            open_archive(uri, None)
    assert not list(tmp_path.rglob("outside*"))


def test_a_name_with_a_colon_is_a_name_like_any_other(tmp_path: Path) -> None:
    files = {**_FILES, "layer:0.weight": "w", "a:b/c": "x"}
    for uri in (write_mar(tmp_path / "m.mar", files, _MODEL), _as_tar(tmp_path / "m.tar.gz", files, _MODEL)):
        archive = open_archive(uri, None)
        assert (archive.folder / "layer:0.weight").read_text() == "w" and (archive.folder / "a:b/c").is_file()
        archive.close()


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.parametrize("size", [1 << 17, 1 << 40])
def test_headers_of_a_tar_that_fill_the_memory_are_not_read(tmp_path: Path, kind: bytes, size: int) -> None:
    header = tarfile.TarInfo("long")
    header.type, header.size = kind, size
    with gzip.open(tmp_path / "m.tar.gz", "wb") as packed:
        packed.write(header.tobuf(format=tarfile.GNU_FORMAT) + b"a" * (1 << 17))
    with pytest.raises(LoadFailed, match=f"the headers of a member have {size} bytes, more than"):
        open_archive(str(tmp_path / "m.tar.gz"), None)


_WRITERS = [("m.mar", write_mar), ("m.tar.gz", _as_tar)]


@pytest.mark.parametrize(("name", "write"), _WRITERS)
@pytest.mark.parametrize(
    ("files", "bounds", "said"),
    [
        ({"zeros": "0" * 3000, "more": "0" * 3000}, UnpackBounds(bytes=5000), "than 5000 bytes: .*maxUnpackedBytes"),
        ({f"file{n}": "" for n in range(60)}, UnpackBounds(files=50), "more than 50 files .*maxUnpackedFiles"),
        ({"/".join("a" * 60) + "/file": ""}, UnpackBounds(files=50), "more than 50 files .*maxUnpackedFiles"),
    ],
)
def test_what_an_archive_unpacks_to_is_bounded_and_nothing_is_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    write: Any,
    files: dict[str, str],
    bounds: UnpackBounds,
    said: str,
) -> None:
    (tmp_path / "unpacked").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "unpacked"))
    uri = write(tmp_path / name, {**_FILES, **files}, _MODEL)
    with pytest.raises(LoadFailed, match=said):
        open_archive(uri, None, bounds)
    assert not list((tmp_path / "unpacked").iterdir())
    open_archive(uri, None, UnpackBounds(bytes=10_000, files=100)).close()


def test_without_settings_an_archive_may_unpack_to_a_hundred_times_its_size_and_to_a_gibibyte(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(20 << 30)
    assert UnpackBounds().bytes_of(tmp_path / "small") == 1 << 30
    assert UnpackBounds().bytes_of(tmp_path / "large") == 100 * 20 << 30


def test_the_bounds_are_settings_of_the_model_and_checked(tmp_path: Path) -> None:
    uri = write_mar(tmp_path / "m.mar", _FILES, _MODEL)

    def load(**extra: Any) -> None:
        settings = ModelSettings(
            name="m", implementation=TorchServeRuntime, parameters=ModelParameters(uri=uri, extra=extra)
        )

        async def scenario() -> None:
            await asyncio.to_thread(build, settings, asyncio.get_running_loop())

        run(scenario())

    for most in (100, "100"):  # Seldon's parameters are strings
        with pytest.raises(LoadFailed, match="unpacks to more than 100 bytes"):
            load(maxUnpackedBytes=most)
    with pytest.raises(LoadFailed, match="more than 2 files and folders"):
        load(maxUnpackedFiles=2)
    for wrong in (0, -1, 1.5, True, "many"):
        with pytest.raises(SettingsError, match="maxUnpackedBytes: must be a whole number above 0"):
            load(maxUnpackedBytes=wrong)


def test_links_and_devices_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.mar", "w") as archive:
        info = zipfile.ZipInfo("link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    with tarfile.open(tmp_path / "m.tar.gz", "w:gz") as tar:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    for name in ("m.mar", "m.tar.gz"):
        with pytest.raises(LoadFailed, match="link or a device"):
            open_archive(str(tmp_path / name), None)


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (None, "no MAR-INF/MANIFEST.json"),
        ("{", "not JSON"),
        ('{"model": {}}', "no model.handler"),
        ("[]", "no model.handler"),
        ('{"runtime": "LSP", "model": {"handler": "x"}}', "the runtime 'LSP' is not supported; only python is"),
        ('{"model": {"handler": "x", "configFile": "missing.yaml"}}', "cannot read missing.yaml"),
    ],
)
def test_what_is_wrong_with_a_manifest_is_said(tmp_path: Path, manifest: str | None, said: str) -> None:
    with zipfile.ZipFile(tmp_path / "m.mar", "w") as archive:
        archive.writestr("handler.py", "")
        if manifest is not None:
            archive.writestr("MAR-INF/MANIFEST.json", manifest)
    with pytest.raises(LoadFailed, match=said):
        open_archive(str(tmp_path / "m.mar"), None)


def test_no_archive_at_all(tmp_path: Path) -> None:
    (tmp_path / "broken.mar").write_bytes(b"PK\x03\x04 nothing")
    (tmp_path / "broken.tar.gz").write_bytes(b"\x1f\x8b nothing")
    (tmp_path / "model.bin").write_bytes(b"")
    for name in ("broken.mar", "broken.tar.gz"):
        with pytest.raises(LoadFailed, match="cannot unpack"):
            open_archive(str(tmp_path / name), None)
    with pytest.raises(SettingsError, match=r"is not a \.mar"):
        open_archive(str(tmp_path / "model.bin"), None)
    with pytest.raises(SettingsError, match="no such archive"):
        open_archive(str(tmp_path / "missing.mar"), None)


def _flipped(path: Path) -> str:
    """Writes an archive with damaged compressed data of a member."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("hello.py", HELLO * 20)
        start = archive.filelist[0].header_offset + 30 + len("hello.py")
    raw = bytearray(path.read_bytes())
    raw[start : start + 8] = b"\xff" * 8
    path.write_bytes(raw)
    return str(path)


def _encrypted(path: Path) -> str:
    """Writes an archive with the flag of an encrypted member."""
    raw = bytearray(Path(write_mar(path, {"hello.py": HELLO})).read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        raw[raw.index(signature) + flags] |= 1
    path.write_bytes(raw)
    return str(path)


def _cut(path: Path) -> str:
    path.write_bytes(Path(write_mar(path, _FILES, _MODEL)).read_bytes()[:-200])
    return str(path)


def _no_archive(path: Path) -> str:
    path.write_bytes(b"<html>not found</html>")
    return str(path)


def _tar_without_its_last_bytes(path: Path) -> str:
    """Writes an archive whose members are complete, but whose checksum is missing."""
    path.write_bytes(Path(_as_tar(path, _FILES, _MODEL)).read_bytes()[:-4])
    return str(path)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_flipped, "cannot unpack .*decompressing"),
        (_encrypted, "cannot unpack .*encrypted"),
        (_cut, "cannot unpack .*: it is a zip file that is damaged or incomplete"),
        (_no_archive, "cannot unpack .*: it is neither a zip nor a .tar.gz"),
        (_tar_without_its_last_bytes, "cannot unpack .*: Compressed file ended"),
        (lambda path: write_mar(path, {**_FILES, "model-config.yaml": "a: 2024-13-45"}, _MODEL), "cannot read"),
        (lambda path: write_mar(path, {"MAR-INF/MANIFEST.json": "[" * 200_000}), "not JSON"),
    ],
)
def test_a_damaged_archive_is_refused_with_the_reason(tmp_path: Path, make: Any, said: str) -> None:
    with pytest.raises(LoadFailed, match=said):
        open_archive(make(tmp_path / "damaged.mar"), None)
