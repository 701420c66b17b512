"""Says on the terminal that a server is ready, with a request to copy.

Knows the server's address, and those settings of its keys and its TLS that clients need. It prints no key.
"""

from __future__ import annotations

import json
import shlex
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from mlserver_torch_stream.cli.openai_key import authorization, key_in_file
from mlserver_torch_stream.client.address import tls_context

READY_SECONDS = 900.0  # the time may include the download of a hub model
POLL_SECONDS = 0.2

_EXAMPLE = {"text_input": "The capital of France is", "max_tokens": 16}
_PREFIX = "MLSERVER_TORCH_STREAM_"
_TRUE = ("1", "true", "t", "yes", "y", "on")  # as pydantic reads it


class Announcement:
    """``environ``: the variables that the server is started with."""

    def __init__(self, host: str, port: int, environ: Mapping[str, str]) -> None:
        self._keys_file = environ.get(f"{_PREFIX}API_KEYS_FILE", "")
        self._certificate = environ.get(f"{_PREFIX}TLS_CERT_FILE", "")
        self._has_page = environ.get(f"{_PREFIX}PAGE", "").lower() in _TRUE
        self._asks_for_certificates = bool(environ.get(f"{_PREFIX}TLS_CLIENT_CA_FILE"))
        self.url = f"{'https' if self._certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    def wait_and_print(self, out: TextIO, limit: float = READY_SECONDS) -> None:
        """Prints nothing if the server never gets ready, or wants a certificate of its clients."""
        end = time.monotonic() + limit
        while time.monotonic() < end and not self._asks_for_certificates:
            try:
                self._get("/v2/health/ready", None)
                models = self._get("/v2/repository/index", {"ready": True})
            except (OSError, ValueError):
                time.sleep(POLL_SECONDS)
                continue
            page = f"\nOpen {self.url}/ to chat in a browser.\n" if self._has_page else ""
            print("".join(self._invitation(str(model["name"])) for model in models) + page, file=out, flush=True)
            return

    def _invitation(self, name: str) -> str:
        curl, chat = "curl -N", f"{_command()} chat --url {self.url} --model {name}"
        if self._certificate:
            curl += f" --cacert {shlex.quote(self._certificate)}"
            chat += f" --ca-file {shlex.quote(self._certificate)}"
        if self._keys_file:
            curl += ' -H "Authorization: Bearer $KEY"'
            chat += f" --api-key-file {shlex.quote(self._keys_file)}"
        url = f"{self.url}/v2/models/{name}/generate_stream"
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
    """Trusts the server's own certificate alone, whatever host it is for: the server is asked at its address."""
    context = tls_context(Path(certificate).read_bytes())
    context.check_hostname = False
    return context


def _command() -> str:
    """The installed command as the user can type it: a new virtual environment is not on the path."""
    command = Path(sys.executable).with_name("mlserver-torch-stream")
    near = command.is_relative_to(Path.cwd())
    return str(command.relative_to(Path.cwd()) if near else command) if command.exists() else command.name
