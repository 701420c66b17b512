"""``mlserver-torch-stream serve``: runs ``mlserver start`` on free ports, and prints a request for the user to copy.

The command passes its choices to MLServer through MLServer's environment variables, and never prints an API key.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import re
import shlex
import shutil
import ssl
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

from mlserver_torch_stream.cli.argument_types import authorization, key_in_file, port_number
from mlserver_torch_stream.client.address import tls_context
from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.free_port import free_port, is_free
from mlserver_torch_stream.model_source import EMBEDDED_SCHEME

READY_SECONDS = 900.0  # long, because a hub model may have to be downloaded
POLL_SECONDS = 0.2

_EXAMPLE = {"text_input": "The capital of France is", "max_tokens": 16}
_PREFIX = "MLSERVER_TORCH_STREAM_"
_TRUE = ("1", "true", "t", "yes", "y", "on")  # the words that pydantic reads as true


class Announcement:
    """Waits until the server is ready, and prints requests that the user can copy. ``environ`` is the server's
    environment.
    """

    def __init__(self, host: str, port: int, environ: Mapping[str, str]) -> None:
        self._keys_file = environ.get(f"{_PREFIX}API_KEYS_FILE", "")
        self._certificate = environ.get(f"{_PREFIX}TLS_CERT_FILE", "")
        self._has_page = environ.get(f"{_PREFIX}PAGE", "").lower() in _TRUE
        self._asks_for_certificates = bool(environ.get(f"{_PREFIX}TLS_CLIENT_CA_FILE"))
        self.url = f"{'https' if self._certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    def wait_and_print(self, out: TextIO, limit: float = READY_SECONDS) -> None:
        """Prints the requests once the server is ready.

        Prints nothing if the server is not ready within ``limit`` seconds, or if it requires certificates from clients.
        """
        end = time.monotonic() + limit
        while time.monotonic() < end and not self._asks_for_certificates:
            try:
                self._get("/v2/health/ready", None)
                names = [str(model["name"]) for model in self._get("/v2/repository/index", {"ready": True})]
                models = {name: self._get(f"/v2/models/{quote(name)}", None) for name in names}
            except (OSError, ValueError):
                time.sleep(POLL_SECONDS)
                continue
            page = f"\nOpen {self.url}/ to chat in a browser.\n" if self._has_page else ""
            texts = [self._invitation(name, bool(about["inputs"])) for name, about in models.items()]
            print("".join(texts) + page, file=out, flush=True)
            return

    def _invitation(self, name: str, generates: bool) -> str:
        """Returns the requests to copy. A model that does not generate tokens is a handler; the request to it sends a
        file.
        """
        curl, chat = "curl -N", f"{_command()} chat --url {self.url} --model {shlex.quote(name)}"
        if self._certificate:
            curl += f" --cacert {shlex.quote(self._certificate)}"
            chat += f" --ca-file {shlex.quote(self._certificate)}"
        if self._keys_file:
            curl += ' -H "Authorization: Bearer $KEY"'
            chat += f" --api-key-file {shlex.quote(self._keys_file)}"
        if not generates:
            return f"\n{name} is ready. Send it a file:\n\n  {curl} {self.url}/predictions/{quote(name)} -T FILE\n"
        url = f"{self.url}/v2/models/{quote(name)}/generate_stream"
        return f"\n{name} is ready. Ask it something:\n\n  {curl} {url} -d '{json.dumps(_EXAMPLE)}'\n  {chat}\n"

    def _get(self, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self._keys_file:
            headers |= authorization(key_in_file(self._keys_file))
        request = urllib.request.Request(self.url + path, data, headers)
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]  # the server is on this machine
        if self._certificate:
            handlers.append(urllib.request.HTTPSHandler(context=_trusting(self._certificate)))
        with urllib.request.build_opener(*handlers).open(request, timeout=5) as reply:
            return json.loads(reply.read() or b"null")


def _trusting(certificate: str) -> ssl.SSLContext:
    """Returns a context that trusts only the server's own certificate, for any host name, because the server is reached
    by its address.
    """
    context = tls_context(Path(certificate).read_bytes())
    context.check_hostname = False
    return context


def _command() -> str:
    """Returns the command as the user can type it; if this environment has the command, with its path."""
    command = Path(sys.executable).with_name("mlserver-torch-stream")
    near = command.is_relative_to(Path.cwd())
    return str(command.relative_to(Path.cwd()) if near else command) if command.exists() else command.name


IMPLEMENTATION = "mlserver_torch_stream.TorchStreamRuntime"
SETTINGS = "settings.json"
MODEL_SETTINGS = "model-settings.json"
PAGE = "MLSERVER_TORCH_STREAM_PAGE"
PORTS = {"http": 8080, "grpc": 8081, "metrics": 8082}
EMBEDDED_MODEL = f"{EMBEDDED_SCHEME}smollm2-135m-instruct"
# MLServer's settings for streams on the user's own machine; a file or a variable overrides them.
DEFAULTS = {
    "host": "127.0.0.1",
    "parallel_workers": "0",
    "gzip_enabled": "false",
    "debug": "false",
    "model_repository_implementation": "mlserver_torch_stream.GuardedModelRepository",
}


_OF_ALL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # "all addresses" -> an address at which to reach this machine


class PortTaken(Exception):
    """A requested port is used by another process, or by another endpoint of this server."""


def main(argv: Sequence[str] | None = None) -> int:
    """Starts MLServer with a model, a folder of models or the embedded model, and returns the exit status."""
    arguments = _parser().parse_args(argv)
    repository = Path(arguments.model) if arguments.model and is_repository(Path(arguments.model)) else None
    if repository is not None and arguments.name is not None:
        sys.exit(f"error: --name: {repository} is a folder of models, which have their own names")
    folder = repository or Path(".")  # the folder of the server's settings.json
    model = None if repository is not None else arguments.model or EMBEDDED_MODEL
    for key, value in DEFAULTS.items():
        os.environ.setdefault(f"MLSERVER_{key.upper()}", value)
    os.environ.setdefault(PAGE, "true")
    _import_server()
    try:
        _check_settings(folder)
        host = _host(folder)
        _check_embedded(model)
        options = {role: getattr(arguments, f"{role}_port") for role in PORTS}
        ports = choose_ports(host, asked_ports(options, folder, os.environ))
    except (LoadFailed, PortTaken, SettingsError) as error:
        sys.exit(f"error: {error}")
    os.environ.update({f"MLSERVER_{role.upper()}_PORT": str(port) for role, port in ports.items()})
    with tempfile.TemporaryDirectory(prefix="mlserver-torch-stream-") as scratch:
        served = str(folder)
        if model is not None:
            served = prepare_repository(model, arguments.name, folder, Path(scratch), os.environ)
        announcement = Announcement(_OF_ALL.get(host, host), ports["http"], os.environ)
        print(f"Starting on {announcement.url} (gRPC on port {ports['grpc']})", file=sys.stderr, flush=True)
        threading.Thread(target=announcement.wait_and_print, args=(sys.stderr,), daemon=True).start()
        start_mlserver(served)
    return 0


def _import_server() -> None:
    """Imports MLServer and our part of it. Collections would take a sixth of that time and free nothing."""
    gc.disable()
    try:
        for name in ("mlserver.cli", "mlserver_torch_stream.server.access.model_repository"):
            importlib.import_module(name)
        gc.freeze()  # otherwise everything would be collected once the collector is on
    finally:
        gc.enable()


def start_mlserver(folder: str) -> None:
    """Serves the models in the folder until a signal ends the process."""
    from mlserver.cli import main as mlserver

    sys.argv = ["mlserver", "start", folder]
    mlserver()


def is_repository(folder: Path) -> bool:
    """Returns whether the folder has settings of MLServer or of models in it, and is not itself the folder of a single
    model.
    """
    if (folder / SETTINGS).is_file() or (folder / MODEL_SETTINGS).is_file():
        return True
    is_model = (folder / "config.json").is_file() or any(folder.glob("*.gguf"))
    return not is_model and any(folder.glob(f"**/{MODEL_SETTINGS}"))


def _check_settings(folder: Path) -> None:
    """Raises SettingsError if settings.json is wrong; the message names the file."""
    from mlserver_torch_stream.server.server_settings import check_server_settings

    check_server_settings(folder)


def _check_embedded(model: str | None) -> None:
    """Raises LoadFailed if the embedded model is not installed; the message says how to install it."""
    if model is not None and model.startswith(EMBEDDED_SCHEME):
        from mlserver_torch_stream.engine.loading.embedded import find_embedded

        find_embedded(model.removeprefix(EMBEDDED_SCHEME).strip("/"))


def asked_ports(options: Mapping[str, int | None], folder: Path, environ: Mapping[str, str]) -> dict[str, int | None]:
    """Returns the port of each role, from the options or from the server's settings; None if neither sets it.

    The file settings.json overrides environment variables, and options become variables. Therefore PortTaken is raised
    if an option contradicts the file.
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
    """Returns the port of each role: the port in ``asked``, else the usual port if it is free, else any free port.

    Raises PortTaken if a port in ``asked`` is taken.
    """
    chosen: dict[str, int] = {}
    for role, port in asked.items():
        if port is not None and not is_free(host, port):
            raise PortTaken(f"{role.upper()}_PORT {port} is taken; leave it out, and a free port is chosen")
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
    """Prepares a repository that serves only ``model``, and returns its path.

    The repository in ``scratch`` contains only the server settings of ``folder``; MLServer reads the model's settings
    from ``environ``.
    """
    if (folder / SETTINGS).is_file():
        shutil.copy(folder / SETTINGS, scratch)
    place = Path(model).expanduser()
    environ["MLSERVER_MODEL_IMPLEMENTATION"] = IMPLEMENTATION
    environ["MLSERVER_MODEL_NAME"] = name or re.sub(r"[^\w.-]", "-", place.stem if place.is_file() else place.name)
    environ["MLSERVER_MODEL_URI"] = str(place.resolve()) if place.exists() else model
    return str(scratch)


def _host(folder: Path) -> str:
    """Returns the host on which MLServer will listen; settings.json overrides the variable."""
    return str(_settings(folder).get("host") or os.environ.get("MLSERVER_HOST") or "0.0.0.0")


def _settings(folder: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except OSError:
        return {}
    return settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlserver-torch-stream serve",
        description="Serve a model, or a folder of models, and print a request to copy. A settings.json of the working "
        "directory, or of the folder of models, and MLSERVER_… variables apply as they do for `mlserver start`.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        help="a model: a folder, a .gguf file, a hub id or embedded://…; or a folder of models with their "
        f"{MODEL_SETTINGS} (default: {EMBEDDED_MODEL})",
    )
    parser.add_argument("--name", help="the name of the model for clients (default: the name of its folder or file)")
    for role, usual in PORTS.items():
        parser.add_argument(f"--{role}-port", type=port_number, help=f"default: {usual} if free, else a free port")
    return parser
