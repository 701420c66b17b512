"""What our models are to MLServer whatever they run: guarded, ready or not and why, loaded or refused.

Knows nothing of what is built, nor of requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlserver import MLModel, ModelSettings
from mlserver.logging import logger

from mlserver_torch_stream.errors import LoadFailed, NotServing, SettingsError
from mlserver_torch_stream.protocol.spellings import REST_ROUTES, RestRoute
from mlserver_torch_stream.server import patches
from mlserver_torch_stream.server.lifecycle.inflight_requests import InflightRequests
from mlserver_torch_stream.server.lifecycle.model_slot import ModelSlot
from mlserver_torch_stream.server.status import ModelNotLoaded


class BaseRuntime(MLModel):  # type: ignore[misc]
    """The runtimes derive from it, and say of what kind ``_stay`` is. MLServer reloads their modules, but not this."""

    streams_tokens = True  # the server's mark of a model of ours
    rest_routes: Sequence[RestRoute] = REST_ROUTES  # the rows that a server with this model has

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        patches.install()
        patches.keep_out_of_workers(settings)
        patches.keep_out_of_the_cache(settings)
        self._stay: ModelSlot[Any] = ModelSlot(settings.name)

    @property
    def ready(self) -> bool:
        """What MLServer set after loading, as long as it is true."""
        return self._loaded and self.trouble is None

    @ready.setter
    def ready(self, loaded: bool) -> None:
        self._loaded = loaded

    @property
    def trouble(self) -> str | None:
        """Why the model is not ready."""
        return self._stay.trouble or (None if self._loaded else "it is loading")

    @property
    def visits(self) -> InflightRequests:
        return self._stay.visits

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """What goes wrong in it is one line in the log, and what MLServer tells whoever asked for the load."""
        try:
            patches.refuse_worker_process()
            yield
        except (SettingsError, LoadFailed, NotServing) as error:
            logger.error(f"Cannot load model '{self.name}': {error}")
            raise ModelNotLoaded(str(error)) from None
        except Exception as error:  # a bug: what the traceback is for
            logger.exception(f"Cannot load model '{self.name}'")
            raise ModelNotLoaded(f"{type(error).__name__}: {error}") from None
