"""The base of our runtimes: MLServer is patched, readiness has a reason, and a failed load is one line in the log.

Knows nothing of what a runtime builds, nor of requests.
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
    """A runtime derives from it and declares the type of ``_slot``. MLServer reloads their modules only."""

    streams_tokens = True  # the server's mark of a model of ours
    rest_routes: Sequence[RestRoute] = REST_ROUTES  # the rows that a server with this model has

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        patches.install()
        patches.keep_out_of_workers(settings)
        patches.keep_out_of_the_cache(settings)
        self._slot: ModelSlot[Any] = ModelSlot(settings.name)

    @property
    def ready(self) -> bool:
        """The value that MLServer sets after the load, as long as the model has no trouble."""
        return self._loaded and self.trouble is None

    @ready.setter
    def ready(self, loaded: bool) -> None:
        self._loaded = loaded

    @property
    def trouble(self) -> str | None:
        """Why the model is not ready."""
        return self._slot.trouble or (None if self._loaded else "it is loading")

    @property
    def inflight(self) -> InflightRequests:
        return self._slot.inflight

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Logs an error of the block in one line, and raises it as the error that MLServer returns for the load."""
        try:
            patches.refuse_worker_process()
            yield
        except (SettingsError, LoadFailed, NotServing) as error:
            logger.error(f"Cannot load model '{self.name}': {error}")
            raise ModelNotLoaded(str(error)) from None
        except Exception as error:  # a defect of ours: the log gets its traceback
            logger.exception(f"Cannot load model '{self.name}'")
            raise ModelNotLoaded(f"{type(error).__name__}: {error}") from None
