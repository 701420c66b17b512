"""The certificate of the server's ports: checked at the start, given to uvicorn and to gRPC.

Knows nothing of ports. The files are read once.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import uvicorn

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.server.options import PREFIX, ServerOptions


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files. With ``client_ca`` a client must show a certificate that this authority has signed."""

    certificate: str
    key: str
    client_ca: str

    def configure(self, config: uvicorn.Config) -> None:
        """Makes a listener of uvicorn, which has not begun, speak TLS."""
        config.ssl_certfile, config.ssl_keyfile = self.certificate, self.key
        if self.client_ca:
            config.ssl_ca_certs, config.ssl_cert_reqs = self.client_ca, ssl.CERT_REQUIRED

    def grpc_credentials(self) -> grpc.ServerCredentials:
        pair = (Path(self.key).read_bytes(), Path(self.certificate).read_bytes())
        authority = Path(self.client_ca).read_bytes() if self.client_ca else None
        return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


def tls_files(options: ServerOptions) -> TlsFiles | None:
    """None where there is no TLS. Raises SettingsError, which names the variable."""
    files = TlsFiles(options.tls_cert_file, options.tls_key_file, options.tls_client_ca_file)
    if not any((files.certificate, files.key, files.client_ca)):
        return None
    if not (files.certificate and files.key):
        missing = "TLS_KEY_FILE" if files.certificate else "TLS_CERT_FILE"
        raise SettingsError(f"{PREFIX}{missing}: TLS needs a certificate and its key, and this is not set")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    named = "TLS_CERT_FILE and TLS_KEY_FILE"
    try:
        context.load_cert_chain(files.certificate, files.key, password="")  # else a key with one asks the terminal
        if files.client_ca:
            named = "TLS_CLIENT_CA_FILE"
            context.load_verify_locations(files.client_ca)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise SettingsError(f"{PREFIX}{named}: cannot be used: {_reason(error)}") from None
    return files


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "it is no PEM file of that kind"
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
