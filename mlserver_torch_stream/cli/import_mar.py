"""``mlserver-torch-stream import-mar``: from a TorchServe archive to a folder that ``mlserver start`` serves.

Knows nothing of handlers: nothing of the archive is run, and nothing is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlserver_torch_stream.torchserve.archive import Archive

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_IMPLEMENTATION = "mlserver_torch_stream.TorchServeRuntime"


def main(argv: Sequence[str]) -> int:
    from mlserver_torch_stream.errors import LoadFailed, SettingsError

    arguments = _parser().parse_args(argv)
    try:
        lines = import_mar(arguments.archive, Path(arguments.into), arguments.name)
    except (LoadFailed, SettingsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def import_mar(uri: str, into: Path, name: str | None) -> list[str]:
    """What is to be told. Raises SettingsError or LoadFailed, before anything is written."""
    from mlserver_torch_stream.errors import SettingsError
    from mlserver_torch_stream.torchserve.archive import open_archive

    archive = open_archive(uri, None)
    try:
        chosen = name or str(archive.model.get("modelName") or archive.folder.name)
        if not _NAME.fullmatch(chosen):
            raise SettingsError(f"{chosen!r} is no name for a model: give another one with --name")
        told = list(_told(archive))
        folder = into / chosen
        folder.mkdir(parents=True)
        (folder / "model-settings.json").write_text(
            json.dumps(_settings(uri, folder, chosen, archive), indent=2) + "\n"
        )
    finally:
        archive.close()
    return [f"wrote {folder}/model-settings.json: start it with `mlserver start {folder}`", *told]


def _settings(uri: str, folder: Path, name: str, archive: Archive) -> dict[str, Any]:
    """An archive goes along with its settings; a folder or a bare handler stays where it is."""
    source = Path(uri.removeprefix("file://")).expanduser()
    if archive.own:
        shutil.copyfile(source, folder / source.name)
        uri = f"./{source.name}"
    else:
        uri = str(source.absolute())
    parameters: dict[str, Any] = {"uri": uri}
    if archive.model.get("modelVersion") is not None:
        parameters["version"] = str(archive.model["modelVersion"])
    return {"name": name, "implementation": _IMPLEMENTATION, "parameters": parameters}


def _told(archive: Archive) -> Iterator[str]:
    """What TorchServe would do and we do not, one line each. Raises SettingsError where a value is wrong."""
    from mlserver_torch_stream.torchserve.config import not_honoured, read_config

    for line in not_honoured(archive.yaml, read_config(archive.yaml, {})):
        yield f"not honoured: {line}"
    requirements = archive.model.get("requirementsFile")
    if requirements:
        yield f"not installed: {requirements}: install what it names beside MLServer"
    file = archive.handler.partition(":")[0].rsplit("/", 1)[-1].removesuffix(".py")
    if not (archive.folder / f"{file}.py").is_file() and not (archive.folder / file).is_dir():
        yield f"handler {archive.handler}: TorchServe brings it; install mlserver-torch-stream[torchserve]"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlserver-torch-stream import-mar",
        description="Write a folder with a model-settings.json for a TorchServe archive, and name what is not carried "
        "over.",
    )
    parser.add_argument("archive", help="a .mar, a .tar.gz, an unpacked archive, or handler.py[:function]")
    parser.add_argument("--into", default=".", help="where the model's folder is made (default: here)")
    parser.add_argument("--name", help="the model's name (default: the archive's)")
    return parser
