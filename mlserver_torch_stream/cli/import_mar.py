"""``mlserver-torch-stream import-mar``: writes a folder that MLServer can serve from a TorchServe archive."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mlserver_torch_stream.cli.argument_types import positive
from mlserver_torch_stream.log_text import log_text

if TYPE_CHECKING:
    from mlserver_torch_stream.handlers.config.archive import Archive

SETTINGS = "model-settings.json"
_METRICS = "metrics.yaml"


def main(argv: Sequence[str]) -> int:
    """Unpacks an archive into a folder that MLServer loads, and returns the exit status."""
    from mlserver_torch_stream.errors import LoadFailed, SettingsError
    from mlserver_torch_stream.handlers.config.unpacking import BYTES_KEY, FILES_KEY

    arguments = _parser().parse_args(argv)
    try:
        properties = Path(arguments.properties) if arguments.properties else None
        bounds = {
            BYTES_KEY: arguments.max_unpacked_bytes,
            FILES_KEY: arguments.max_unpacked_files,
        }
        bounds = {key: number for key, number in bounds.items() if number is not None}
        lines = import_mar(arguments.archive, Path(arguments.into), arguments.name, arguments.force, properties, bounds)
    except (LoadFailed, SettingsError, OSError, UnicodeDecodeError) as error:
        print(f"error: {log_text(error).removeprefix('parameters.uri: ')}", file=sys.stderr)
        return 1
    print("\n".join(map(log_text, lines)))
    return 0


def import_mar(
    uri: str, into: Path, name: str | None, force: bool, properties: Path | None, bounds: Mapping[str, int]
) -> list[str]:
    """Writes the model's folder, and returns lines to show to the user.

    ``properties`` is the path of TorchServe's config.properties. ``bounds`` maps keys of ``parameters.extra`` to limits
    of the unpacked size. Raises SettingsError or LoadFailed before anything is written, or OSError.
    """
    from mlserver_torch_stream.handlers.config.archive import model_name, model_settings, model_version, open_archive
    from mlserver_torch_stream.handlers.config.properties import METRICS_CONFIG, carried, read_properties_file
    from mlserver_torch_stream.handlers.config.unpacking import take_bounds
    from mlserver_torch_stream.handlers.config.worker_settings import find_metrics_config

    archive = open_archive(uri, None, take_bounds(dict(bounds)))
    try:
        chosen = model_name(archive, name, Path(uri).name)
        given = read_properties_file(properties) if properties is not None else {}
        version = model_version(archive)
        extra = carried(given, chosen, version, archive.yaml)
        source = Path(uri.removeprefix("file://")).expanduser()
        notes = [
            *_archive_notes(archive, extra, str(source.absolute())),
            *_property_notes(given, chosen, version, extra),
        ]
        folder = into / chosen
        copied = {source.name: source} if archive.own else {}
        if METRICS_CONFIG in given:
            copied[_METRICS] = find_metrics_config(given[METRICS_CONFIG], str(properties and properties.parent))
            extra[METRICS_CONFIG] = f"./{_METRICS}"
        place = f"./{source.name}" if archive.own else str(source.absolute())  # a folder is not copied
        _write(folder, copied, model_settings(chosen, place, version, {**extra, **bounds}), force)
    finally:
        archive.close()
    return [f"wrote {folder}/{SETTINGS}: start it with `mlserver-torch-stream serve {folder}`", *notes]


def _write(folder: Path, copied: Mapping[str, Path], settings: Mapping[str, Any], force: bool) -> None:
    """Writes the folder completely or not at all: writes a hidden folder next to it, which is renamed when it is
    complete.

    ``copied`` maps file names in the folder to the files to copy. If the folder exists, ``force`` replaces the settings
    and the archive in it and keeps all other files; without ``force`` SettingsError is raised.
    """
    _check_folder(folder, force)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = folder.parent / f".{folder.name}.{uuid4().hex}"  # MLServer skips hidden folders
    staged.mkdir()
    try:
        for name, file in copied.items():
            shutil.copyfile(file, staged / name)
        (staged / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
        if not folder.exists():
            staged.rename(folder)
            return
        for name in sorted((each.name for each in staged.iterdir()), key=lambda name: name == SETTINGS):
            (staged / name).replace(folder / name)  # the settings last, because they name the archive
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _check_folder(folder: Path, force: bool) -> None:
    from mlserver_torch_stream.errors import SettingsError

    if not folder.exists() and not folder.is_symlink():
        return
    if not force:
        raise SettingsError(
            f"{folder} exists already: --force replaces its {SETTINGS} and archive, --name or --into choose another "
            "folder"
        )
    if not folder.is_dir() or (folder / SETTINGS).is_dir():
        raise SettingsError(f"{folder} is not the folder of a model: --name or --into choose another one")


def _property_notes(
    given: Mapping[str, str], name: str, version: str | None, extra: Mapping[str, Any]
) -> Iterator[str]:
    from mlserver_torch_stream.handlers.config.properties import not_carried_over

    for key, value in extra.items():
        yield f"carried over from config.properties: {key}: {value}"
    for line in not_carried_over(given, name, version):
        yield f"not carried over from config.properties: {line}"


def _archive_notes(archive: Archive, extra: Mapping[str, Any], uri: str) -> Iterator[str]:
    """Yields a line for each part of an archive that has an effect in TorchServe but not here.

    Raises SettingsError if a setting of the model is wrong.
    """
    from mlserver_torch_stream.handlers.config.model_config import not_honoured, read_config
    from mlserver_torch_stream.handlers.config.worker_settings import not_installed
    from mlserver_torch_stream.handlers.worker.handler import BUILT_IN

    config = read_config(archive.yaml, extra)
    for line in not_honoured(archive.yaml, config):
        yield f"not honoured: {line}"
    if archive.requirements:
        yield not_installed(archive.packed_requirements, uri, config.useVenv)
    file = archive.handler.partition(":")[0].rsplit("/", 1)[-1].removesuffix(".py")
    if not (archive.folder / f"{file}.py").is_file() and not (archive.folder / file).is_dir():
        known = f"it is one of TorchServe's own; install {BUILT_IN[file]}" if file in BUILT_IN else None
        yield f"handler {archive.handler}: {known or 'neither the archive nor TorchServe has it'}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlserver-torch-stream import-mar",
        description="Write a folder with a model-settings.json for a TorchServe archive, and list the settings that "
        "are not carried over.",
    )
    parser.add_argument("archive", help="a .mar, a .tar.gz, an unpacked archive, or handler.py[:function]")
    parser.add_argument("--into", default=".", help="where to make the model's folder (default: here)")
    parser.add_argument("--name", help="the model's name (default: the archive's)")
    parser.add_argument(
        "--properties",
        metavar="FILE",
        help="TorchServe's config.properties: the model's keys are copied to parameters.extra, the others are listed",
    )
    for what, default in (("bytes", "100 times the archive's size, and at least 1 GiB"), ("files", "50000")):
        parser.add_argument(
            f"--max-unpacked-{what}",
            type=positive,
            metavar="N",
            help=f"{what} that the archive may unpack to; goes into parameters.extra (default: {default})",
        )
    parser.add_argument(
        "--force", action="store_true", help="replace the settings and the archive in a folder that exists already"
    )
    return parser
