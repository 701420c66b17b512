"""Holds the API keys, the endpoints that need no key, and the certificate of this process's ports.

Knows nothing of how a port applies them.
"""

from __future__ import annotations

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.server.access.api_keys import ApiKeys
from mlserver_torch_stream.server.access.open_endpoints import OpenEndpoints
from mlserver_torch_stream.server.access.tls import TlsFiles, tls_files
from mlserver_torch_stream.server.options import PREFIX, ServerOptions
from mlserver_torch_stream.server.page.page_files import page_paths

REPOSITORY = "mlserver_torch_stream.GuardedModelRepository"


class AccessControl:
    """Empty until MLServer creates its model repository, which happens before it creates a port."""

    def __init__(self) -> None:
        self.keys: ApiKeys | None = None
        self.open = OpenEndpoints(metrics=True, repository=True)
        self.tls: TlsFiles | None = None
        self._guards = False

    def configure(self, options: ServerOptions) -> None:
        """Raises SettingsError, which names the variable."""
        self._guards = True
        self.tls = tls_files(options)
        page = page_paths() if options.page else frozenset[str]()
        self.open = OpenEndpoints(options.metrics_without_key, options.repository_without_key, page)
        try:
            self.keys = ApiKeys(options.api_keys_file) if options.api_keys_file else None
        except SettingsError as error:
            raise SettingsError(f"{PREFIX}API_KEYS_FILE: {error}") from None

    def without_keys(self) -> AccessControl:
        """The certificate alone, for a port that checks a token of its own."""
        unkeyed = AccessControl()
        unkeyed.tls = self.tls
        return unkeyed

    def check(self, options: ServerOptions) -> None:
        """Raises SettingsError if the options ask for keys or TLS, but the ports were opened without them."""
        asked = {"API_KEYS_FILE": options.api_keys_file, "TLS_CERT_FILE": options.tls_cert_file}
        for name, value in asked.items():
            if value and not self._guards:
                raise SettingsError(
                    f"{PREFIX}{name} needs MLSERVER_MODEL_REPOSITORY_IMPLEMENTATION={REPOSITORY}: MLServer opens its "
                    "ports before it looks at any model"
                )
