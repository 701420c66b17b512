"""The API keys and the TLS certificate of this process's ports, and the endpoints that need no key.

Only digests of the keys are kept, and no message quotes a key. Every path and method that is not listed as open needs a
key, even for models of other runtimes. Certificates are read once.
"""

from __future__ import annotations

import hmac
import os
import re
import ssl
from collections.abc import Sequence, Set
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import grpc
import uvicorn
from mlserver.logging import logger

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.server.options import PREFIX, ServerOptions
from mlserver_torch_stream.server.page.page_routes import page_paths

_KEY = re.compile(r"[\x21-\x7e]+")  # characters that a header can contain without quotes
_SCHEME = "bearer"


class ApiKeys:
    """The keys of a file, one a line; empty lines and lines that begin with ``#`` are skipped.

    The file is read again when it changes. Raises SettingsError if the file cannot be read or has no key.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        try:
            self._version: object = self._file_version()
            self._digests = self._read()
        except OSError as error:
            raise SettingsError(f"the key file {path} cannot be read: {os.strerror(error.errno or 0)}") from None

    def accept(self, authorizations: Sequence[str]) -> bool:
        """Whether the request is authorized. ``authorizations`` are its ``Authorization`` headers, which must be
        exactly one ``Bearer`` with a valid key.
        """
        self._follow_the_file()
        if len(authorizations) != 1:
            return False
        scheme, _, key = authorizations[0].partition(" ")
        given = _digest(key.strip(" "))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == _SCHEME and any(matches)

    def _follow_the_file(self) -> None:
        """Reads the file again if it has changed. If it cannot be read, the previous keys stay valid, and one line is
        logged.
        """
        try:
            version: object = self._file_version()
        except OSError as error:
            version = error.errno
        if version == self._version:
            return
        self._version = version
        try:
            self._digests = self._read()
            logger.info(f"Read the keys in {self._path} again; number of keys: {len(self._digests)}")
        except (OSError, SettingsError) as error:
            reason = error if isinstance(error, SettingsError) else os.strerror(error.errno or 0)
            logger.error(f"Cannot read the keys in {self._path} again, so the earlier ones stay valid: {reason}")

    def _file_version(self) -> tuple[int, int, int, int]:
        """Returns a value that changes when the file is written or replaced, even by a file with the same modification
        time.
        """
        found = self._path.stat()
        return found.st_ctime_ns, found.st_mtime_ns, found.st_ino, found.st_size

    def _read(self) -> frozenset[bytes]:
        lines = self._path.read_bytes().decode("latin-1").split("\n")
        keys = [(number, line.strip(" \t\r")) for number, line in enumerate(lines, 1)]
        keys = [(number, key) for number, key in keys if key and not key.startswith("#")]
        for number, key in keys:
            if not _KEY.fullmatch(key):
                raise SettingsError(f"line {number} of {self._path} has characters that a header cannot contain")
        if not keys:
            raise SettingsError(f"the key file {self._path} has no keys")
        return frozenset(_digest(key) for _, key in keys)


def _digest(key: str) -> bytes:
    """Hashes a key. All digests have one length, so the time of a comparison does not depend on the key's length."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


_REST_HEALTH = re.compile(r"/health|/ping|/v2/health/(live|ready)|/v2/models/[^/]+(/versions/[^/]+)?/ready")
_REST_REPOSITORY = re.compile(r"/v2/repository/(index|models/[^/]+/(load|unload))")
_READING = ("GET", "HEAD")

_SERVICE = "/inference.GRPCInferenceService/"
_OLD_REPOSITORY = "/inference.model_repository.ModelRepositoryService/"
_GRPC_HEALTH = frozenset(f"{_SERVICE}{method}" for method in ("ServerLive", "ServerReady", "ModelReady"))
_GRPC_REPOSITORY = frozenset(
    f"{service}{method}"
    for service in (_SERVICE, _OLD_REPOSITORY)
    for method in ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload")
)


@dataclass(frozen=True)
class OpenEndpoints:
    """The endpoints that need no key: always those of health, and others if the settings say so."""

    metrics: bool
    repository: bool
    page: Set[str] = frozenset()  # the paths of the page's files

    def rest(self, method: str, path: str, metrics_endpoint: str | None) -> bool:
        """Whether a REST path needs no key. ``path`` is decoded, without the server's root path."""
        if method in _READING and (path in self.page or _REST_HEALTH.fullmatch(path)):
            return True
        if method in _READING and self.metrics and path == metrics_endpoint:
            return True
        return self.repository and _REST_REPOSITORY.fullmatch(path) is not None

    def grpc(self, method: str) -> bool:
        """Whether a gRPC method needs no key.

        ``method`` is a path such as ``/inference.GRPCInferenceService/ModelInfer``.
        """
        return method in _GRPC_HEALTH or (self.repository and method in _GRPC_REPOSITORY)


@dataclass(frozen=True)
class TlsFiles:
    """The paths of PEM files. With ``client_ca`` clients must have a certificate that this authority has signed."""

    certificate: str
    key: str
    client_ca: str

    def configure(self, config: uvicorn.Config) -> None:
        """Switches TLS on for a listener of uvicorn that has not started yet."""
        config.ssl_certfile, config.ssl_keyfile = self.certificate, self.key
        if self.client_ca:
            config.ssl_ca_certs, config.ssl_cert_reqs = self.client_ca, ssl.CERT_REQUIRED

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Returns the credentials for a gRPC port."""
        pair = (Path(self.key).read_bytes(), Path(self.certificate).read_bytes())
        authority = Path(self.client_ca).read_bytes() if self.client_ca else None
        return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


def tls_files(options: ServerOptions) -> TlsFiles | None:
    """Returns the files that the options name, after a check; None without TLS.

    Raises SettingsError, which names the variable.
    """
    files = TlsFiles(options.tls_cert_file, options.tls_key_file, options.tls_client_ca_file)
    if not any((files.certificate, files.key, files.client_ca)):
        return None
    if not (files.certificate and files.key):
        missing = "TLS_KEY_FILE" if files.certificate else "TLS_CERT_FILE"
        raise SettingsError(f"{PREFIX}{missing}: is not set, but TLS needs both a certificate and its key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    named = f"TLS_CERT_FILE and {PREFIX}TLS_KEY_FILE"
    try:
        context.load_cert_chain(files.certificate, files.key, password="")  # None would ask for one on the terminal
        if files.client_ca:
            named = "TLS_CLIENT_CA_FILE"
            context.load_verify_locations(files.client_ca)
    except (OSError, ValueError) as error:  # ssl.SSLError is a subclass of OSError
        raise SettingsError(f"{PREFIX}{named}: cannot be used: {_reason(error)}") from None
    return files


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "it is not a PEM file of the expected kind"
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


REPOSITORY = "mlserver_torch_stream.GuardedModelRepository"


class AccessControl:
    """The keys, the open endpoints and the certificate of this process.

    The object is empty until MLServer creates its model repository, which happens before MLServer opens its ports.
    """

    def __init__(self) -> None:
        self.keys: ApiKeys | None = None
        self.open = OpenEndpoints(metrics=True, repository=True)
        self.tls: TlsFiles | None = None
        self._guards = False

    def configure(self, options: ServerOptions) -> None:
        """Reads the files that the options name. Raises SettingsError, which names the variable."""
        self._guards = True
        self.tls = tls_files(options)
        page = page_paths() if options.page else frozenset[str]()
        self.open = OpenEndpoints(options.metrics_without_key, options.repository_without_key, page)
        try:
            self.keys = ApiKeys(options.api_keys_file) if options.api_keys_file else None
        except SettingsError as error:
            raise SettingsError(f"{PREFIX}API_KEYS_FILE: {error}") from None

    def without_keys(self) -> AccessControl:
        """Returns a copy with the certificate but without keys, for a port that checks a separate token."""
        unkeyed = AccessControl()
        unkeyed.tls = self.tls
        return unkeyed

    def check(self, options: ServerOptions) -> None:
        """Raises SettingsError if the options ask for keys or TLS but the ports were opened without them."""
        asked = {"API_KEYS_FILE": options.api_keys_file, "TLS_CERT_FILE": options.tls_cert_file}
        for name, value in asked.items():
            if value and not self._guards:
                raise SettingsError(
                    f"{PREFIX}{name} needs MLSERVER_MODEL_REPOSITORY_IMPLEMENTATION={REPOSITORY}: MLServer opens its "
                    "ports before it reads any model's settings"
                )
