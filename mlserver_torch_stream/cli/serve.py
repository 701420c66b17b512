"""``python -m mlserver_torch_stream.cli.serve``: runs ``mlserver start`` on free ports, and prints a request to copy.

Knows of a model only its location. It passes its choices to MLServer by MLServer's own environment variables.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from mlserver_torch_stream.free_port import free_port, is_free

IMPLEMENTATION = "mlserver_torch_stream.TorchStreamRuntime"
SETTINGS = "settings.json"
PORTS = {"http": 8080, "grpc": 8081, "metrics": 8082}
READY_SECONDS = 900.0  # the time may include the download of a hub model
POLL_SECONDS = 0.2

_EXAMPLE = {"text_input": "The capital of France is", "max_tokens": 16}


class PortTaken(Exception):
    """A given port is taken by another process, or by another endpoint of this server."""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    host = _host(Path(arguments.folder))
    try:
        options = {role: getattr(arguments, f"{role}_port") for role in PORTS}
        ports = choose_ports(host, asked_ports(options, Path(arguments.folder), os.environ))
    except PortTaken as error:
        sys.exit(f"error: {error}")
    os.environ.update({f"MLSERVER_{role.upper()}_PORT": str(port) for role, port in ports.items()})
    with tempfile.TemporaryDirectory(prefix="mlserver-torch-stream-") as scratch:
        folder = arguments.folder
        if arguments.model:
            folder = prepare_repository(arguments.model, arguments.name, Path(folder), Path(scratch), os.environ)
        url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{ports['http']}"
        print(f"Starting on {url} (gRPC on port {ports['grpc']})", file=sys.stderr, flush=True)
        threading.Thread(target=announce, args=(url, sys.stderr), daemon=True).start()

        start_mlserver(folder)


def start_mlserver(folder: str) -> None:
    """Serves the models in the folder until the process is told to end."""
    from mlserver.cli import main as mlserver

    sys.argv = ["mlserver", "start", folder]
    mlserver()


def asked_ports(options: Mapping[str, int | None], folder: Path, environ: Mapping[str, str]) -> dict[str, int | None]:
    """The port of each role by the options, else by the server's settings, of which the file beats the variables.

    Raises PortTaken where an option contradicts the file: options become variables, which the file would beat.
    """
    in_file = _settings(folder)
    asked: dict[str, int | None] = {}
    for role, option in options.items():
        key = f"{role}_port"
        fixed = in_file.get(key)
        if option is not None and fixed not in (None, option):
            raise PortTaken(f"--{role}-port {option}: {SETTINGS} in {folder} says {key} {fixed}")
        given = fixed or option or environ.get(f"MLSERVER_{key.upper()}")
        asked[role] = None if given is None else int(given)
    return asked


def choose_ports(host: str, asked: Mapping[str, int | None]) -> dict[str, int]:
    """The given port of each role, else its usual port, else a free one. Raises PortTaken."""
    chosen: dict[str, int] = {}
    for role, port in asked.items():
        if port is not None and not is_free(host, port):
            raise PortTaken(f"{role.upper()}_PORT {port} is taken; leave it out, and a free one is found")
        if port is not None:
            chosen[role] = port
    for role, usual in PORTS.items():
        if role not in chosen:
            free = usual not in chosen.values() and is_free(host, usual)
            chosen[role] = usual if free else free_port(host, set(chosen.values()))
    return chosen


def prepare_repository(
    model: str, name: str | None, folder: Path, scratch: Path, environ: MutableMapping[str, str]
) -> str:
    """Makes an empty repository with ``folder``'s server settings: MLServer then takes the model from ``environ``."""
    if (folder / SETTINGS).is_file():
        shutil.copy(folder / SETTINGS, scratch)
    place = Path(model).expanduser()
    environ["MLSERVER_MODEL_IMPLEMENTATION"] = IMPLEMENTATION
    environ["MLSERVER_MODEL_NAME"] = name or re.sub(r"[^\w.-]", "-", place.stem if place.is_file() else place.name)
    environ["MLSERVER_MODEL_URI"] = str(place.resolve()) if place.exists() else model
    return str(scratch)


def announce(url: str, out: TextIO, limit: float = READY_SECONDS) -> None:
    """Waits until the server is ready and prints a request to copy. Prints nothing if the server never gets ready."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        try:
            _get(f"{url}/v2/health/ready", None)
            models = _get(f"{url}/v2/repository/index", {"ready": True})
        except (OSError, ValueError):
            time.sleep(POLL_SECONDS)
            continue
        print("".join(_invitation(url, str(model["name"])) for model in models), file=out, flush=True)
        return


def _invitation(url: str, name: str) -> str:
    body = json.dumps(_EXAMPLE)
    return (
        f"\n{name} is ready. Ask it something:\n\n"
        f"  curl -N {url}/v2/models/{name}/generate_stream -d '{body}'\n"
        f"  {_command()} chat --url {url} --model {name}\n"
    )


def _command() -> str:
    """The installed command as the user can type it: a new virtual environment is not on the path."""
    command = Path(sys.executable).with_name("mlserver-torch-stream")
    near = command.is_relative_to(Path.cwd())
    return str(command.relative_to(Path.cwd()) if near else command) if command.exists() else command.name


def _get(url: str, body: Mapping[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy, as the server is on this machine
    with opener.open(request, timeout=5) as reply:
        return json.loads(reply.read() or b"null")


def _host(folder: Path) -> str:
    """The host on which MLServer will listen: its settings file beats its variable."""
    return str(_settings(folder).get("host") or os.environ.get("MLSERVER_HOST") or "0.0.0.0")


def _settings(folder: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except OSError:
        return {}
    return settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mlserver_torch_stream.cli.serve", description=__doc__)
    parser.add_argument("folder", nargs="?", default=".", help="where settings.json and the models' settings are")
    parser.add_argument("--model", help="serve this instead: a folder, a .gguf file, a hub id or embedded://…")
    parser.add_argument("--name", help="the name to serve it under (default: that of its folder or file)")
    for role, usual in PORTS.items():
        parser.add_argument(f"--{role}-port", type=int, help=f"default: {usual} if free, else any free one")
    return parser


if __name__ == "__main__":
    main()
