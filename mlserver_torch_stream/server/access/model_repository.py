"""A model repository for MLServer. Creating it patches MLServer, and makes every port check keys and use TLS if the
options ask for that.

The class of the repository is a setting of MLServer. MLServer creates the repository before it opens its ports, and
imports the class of a model only after that.
"""

from __future__ import annotations

import glob
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from mlserver import ModelSettings, Settings

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.server import patches
from mlserver_torch_stream.server.access.access_control import AccessControl
from mlserver_torch_stream.server.access.guards import GuardedAio, RestGuard
from mlserver_torch_stream.server.host import guard_ports, ports_are_guarded
from mlserver_torch_stream.server.lifecycle.unreadable_model import readable_or_not
from mlserver_torch_stream.server.options import read_options
from mlserver_torch_stream.server.state import server_state
from mlserver_torch_stream.settings import SETTINGS_FILE

if TYPE_CHECKING:

    class SchemalessModelRepository:
        """The part of MLServer's class that is used here."""

        def __init__(self, root: str) -> None: ...

        async def list(self) -> list[ModelSettings]: ...
else:
    from mlserver.repository.repository import SchemalessModelRepository


class GuardedModelRepository(SchemalessModelRepository):
    """MLServer's repository, extended so that a server has our routes and ports even before it has a model.

    If a setting of keys or TLS is wrong, the process prints one line and ends with status 1.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._files = os.path.join(os.path.abspath(root), "**", SETTINGS_FILE)  # MLServer's own pattern
        state = server_state()
        try:
            state.access.configure(read_options())
        except SettingsError as error:
            sys.exit(f"The server cannot start: {error}")
        install(state.access)
        patches.install_at_start(GuardedModelRepository, state)

    async def list(self) -> list[ModelSettings]:
        """Returns the settings of every model below the folder; if there is no file, those in environment variables.

        A model whose settings cannot be read is listed too, so that its load fails with the reason.
        """
        found = [readable_or_not(Path(path)) for path in glob.glob(self._files, recursive=True)]
        return found or await super().list()


def install(access: AccessControl) -> None:
    """Guards the ports that MLServer creates from now on. Idempotent."""
    if not ports_are_guarded():
        guard_ports(GuardedAio(access), partial(_guard, access))


def _guard(access: AccessControl, config: uvicorn.Config, settings: Settings, is_rest: bool) -> None:
    if access.keys is not None:
        preflights = is_rest and settings.cors_settings is not None
        config.app = RestGuard(config.app, access, settings.metrics_endpoint, preflights)  # type: ignore[arg-type]
    if access.tls is not None:
        access.tls.configure(config)
