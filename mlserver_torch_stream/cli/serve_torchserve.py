"""``mlserver-torch-stream serve-torchserve``: serves TorchServe's model store as TorchServe's configuration says.

The command writes one model-settings.json for each archive into a temporary folder, sets MLServer's environment
variables, and runs ``mlserver start``. The archives are not moved.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlserver_torch_stream.cli import import_mar
from mlserver_torch_stream.cli.serve import start_mlserver
from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.log_text import log_text
from mlserver_torch_stream.version import __version__

if TYPE_CHECKING:
    from mlserver_torch_stream.handlers.config.server_config import ServerConfig
    from mlserver_torch_stream.handlers.config.store_files import StoredModel

_STORE, _FILE = "model-store", "config/config.properties"  # in a folder that KServe's storage initializer fills
_USUAL_FILE = "config.properties"  # in the working directory
_FILE_VARIABLE = "TS_CONFIG_FILE"
_NO_MODELS = "no model is loaded: the management API registers models if it is open and enable_model_api is true"
_NO_EFFECT = {
    "log_config": "MLServer's logging_settings",
    "plugins_path": "JVM plugins are not carried over",
    "no_config_snapshots": "no snapshot is written in any case",
}


def main(argv: Sequence[str]) -> int:
    """Starts MLServer with TorchServe's model store, and returns the exit status."""
    from mlserver_torch_stream.handlers.config.unpacking import OwnFolder

    arguments = _parser().parse_args(argv)
    folder = OwnFolder()
    try:
        variables, lines = prepare(arguments, folder.path)
        print("\n".join(map(log_text, lines)), file=sys.stderr, flush=True)
        os.environ.update(variables)
        start_mlserver(str(folder.path))
    except (LoadFailed, SettingsError) as error:
        print(f"error: {log_text(error)}", file=sys.stderr)
        return 1
    finally:
        folder.remove()
    return 0


def prepare(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Writes the models' settings into the folder. Returns the variables to set, and lines to show to the user.

    Raises SettingsError or LoadFailed.
    """
    from mlserver_torch_stream.handlers.config.server_config import ServerConfig
    from mlserver_torch_stream.handlers.runtime.build import gpu_count

    file = config_file(arguments)
    config = ServerConfig.read(file, _as_properties(arguments))
    variables, lines = config.environment(gpu_count)
    lines = [*config.ignored(), *lines]
    lines += [f"{_option(name)}: ignored: {why}" for name, why in _NO_EFFECT.items() if getattr(arguments, name)]
    # With --start the command line is TorchServe's own, which loads only the models that it names.
    served = write_models(config.stored_models("none" if arguments.start else "all"), config, folder)
    where = f"configuration: {file}" if file is not None else "configuration: TorchServe's defaults, no file"
    return variables, [where, *lines, *(served or [_NO_MODELS])]


def config_file(arguments: argparse.Namespace) -> Path | None:
    """Returns the configuration file that the variable or the command line names, else the file in the usual place.

    Returns None if there is no such file. Raises SettingsError if a named file does not exist.
    """
    in_folder = Path(arguments.folder, _FILE) if arguments.folder else Path(_USUAL_FILE)
    given = os.environ.get(_FILE_VARIABLE) or arguments.ts_config
    if given is None:
        return in_folder if in_folder.is_file() else None
    if not Path(given).is_file():
        raise SettingsError(f"--ts-config or {_FILE_VARIABLE}: no such file: {given}")
    return Path(given)


def write_models(stored: Sequence[StoredModel], config: ServerConfig, folder: Path) -> list[str]:
    """Writes a model-settings.json for each archive, and returns lines to show to the user.

    If an archive is missing, cannot be read, or has the same name and version as another, it becomes a model whose load
    fails, so that the reason is in the server's log. Raises SettingsError for a wrong configuration.
    """
    from mlserver_torch_stream.handlers.config.archive import model_settings, read_named
    from mlserver_torch_stream.server.lifecycle.unreadable_model import unreadable_settings

    served: dict[tuple[str, str], Path] = {}
    lines = []
    for each in stored:
        path = each.path.absolute()
        try:
            if not path.exists():
                raise LoadFailed(f"{path}: the model store has no such archive")
            name, version, yaml = read_named(path, each.name)
            if (name, version) in served:
                raise LoadFailed(f"{path}: {served[name, version]} is already version {version} of {name}")
        except (LoadFailed, SettingsError) as error:
            why = f"{path}: {error}" if isinstance(error, SettingsError) else str(error)
            if isinstance(error, SettingsError) and each.name is not None:  # the wrong name is in the configuration
                raise SettingsError(why) from None
            _write_settings(folder / path.name, unreadable_settings(path.name, why))
            lines.append(f"not served: {why}")
            continue
        if each.version not in (None, version):
            place = f"config.properties: model_snapshot: {name} {each.version}"
            problem = f"the archive {path.name} has version {version}, which cannot be changed"
            raise SettingsError(f"{place}: {problem}")
        served[name, version] = each.path
        extra = config.stored_extra(each, name, version, yaml)
        _write_settings(folder / name / version, model_settings(name, str(path), version, extra))
        lines.append(f"model {name} {version}: {each.path}")
    return lines


def _write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / import_mar.SETTINGS).write_text(json.dumps(settings))


def _as_properties(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the keys of config.properties that the command line sets."""
    store = arguments.model_store or (str(Path(arguments.folder, _STORE)) if arguments.folder else None)
    given = {
        "model_store": store,
        "workflow_store": arguments.workflow_store,
        "cpp_log_config": arguments.cpp_log_config,
        "load_models": ",".join(arguments.models) if arguments.models else None,
        "disable_token_authorization": "true" if arguments.disable_token_auth else None,
        "enable_model_api": "true" if arguments.enable_model_api else None,
    }
    return {key: value for key, value in given.items() if value}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class _Stop(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error("--stop: the server runs in the foreground; end it with SIGTERM or Ctrl-C")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlserver-torch-stream serve-torchserve",
        description="Serve the archives of a TorchServe model store as its config.properties says, and list the keys "
        "that have no effect. The options are the same as torchserve's; the server runs in the foreground.",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="FOLDER",
        help=f"a folder with {_STORE}/ and {_FILE}, as KServe mounts it; without it, the options say what to serve",
    )
    parser.add_argument("-v", "--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument(
        "--start", action="store_true", help="as TorchServe does, load only the archives that are named (default: all)"
    )
    parser.add_argument("--foreground", action="store_true", help="no effect: the server always runs in the foreground")
    parser.add_argument("--stop", action=_Stop, nargs=0, help="refused: end the process instead")
    parser.add_argument(
        "--ts-config", help=f"TorchServe's configuration; {_FILE_VARIABLE} overrides it (default: ./{_USUAL_FILE})"
    )
    parser.add_argument("--model-store", help="the folder of the archives")
    parser.add_argument(
        "--models", nargs="+", metavar="[NAME=]ARCHIVE", help="archives of the model store to load, or all, or none"
    )
    parser.add_argument("--disable-token-auth", "--dt", action="store_true", help="no request needs a token")
    parser.add_argument(
        "--enable-model-api",
        action="store_true",
        help="let the management API register and unregister models, as the key enable_model_api does",
    )
    for name in ("--workflow-store", "--log-config", "--cpp-log-config"):
        parser.add_argument(name, help="no effect; a line at the start says so")
    parser.add_argument("--plugins-path", "--ppath", help="no effect; a line at the start says so")
    parser.add_argument(
        "--no-config-snapshots", "--ncs", action="store_true", help="no effect; a line at the start says so"
    )
    return parser
