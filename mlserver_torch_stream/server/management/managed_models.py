"""Finds, describes, registers, scales and unregisters models for TorchServe's management API.

The registry's lock prevents concurrent loads and unloads of the same name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from mlserver import MLModel, ModelSettings
from mlserver.errors import MLServerError, ModelNotFound
from mlserver.logging import logger
from mlserver.registry import MultiModelRegistry
from mlserver.repository import ModelRepository

from mlserver_torch_stream.errors import LoadFailed, NotServing
from mlserver_torch_stream.handlers.config.registration import read_registration, registered_settings
from mlserver_torch_stream.handlers.config.server_config import ServerConfig
from mlserver_torch_stream.handlers.config.store_files import (
    ManagementRefusal,
    StoreFiles,
    bad_request,
    internal,
    no_model,
)
from mlserver_torch_stream.log_text import log_text
from mlserver_torch_stream.server.host import all_models, default_models, find_model, versions_of
from mlserver_torch_stream.server.lifecycle import default_version
from mlserver_torch_stream.server.request import HandlerModel, find_accepted, is_ours
from mlserver_torch_stream.server.rest.prediction_messages import NoSuchModel
from mlserver_torch_stream.work_threads import in_thread

Found = list[Any]  # ModelSettings; an alias, because the class below has a method ``list``


class RegisteredRepository(ModelRepository):  # type: ignore[misc]
    """A repository with the models that the management API has registered and the models of ``original``."""

    def __init__(self, original: ModelRepository) -> None:
        self._original = original
        self._registered: dict[tuple[str, str], ModelSettings] = {}

    def add(self, name: str, version: str, settings: ModelSettings) -> None:
        """Adds the settings of a version that was registered."""
        self._registered[name, version] = settings

    def remove(self, name: str, version: str) -> None:
        """Removes the settings of a version that was unregistered."""
        self._registered.pop((name, version), None)

    async def list(self) -> Found:
        return [*await self._original.list(), *self._registered.values()]

    async def find(self, name: str) -> Found:
        registered = [settings for (known, _), settings in self._registered.items() if known == name]
        if not registered:
            found: Found = await self._original.find(name)
            return found
        return [*(each for each in await self._original.list() if each.name == name), *registered]


ACCEPTED = (202, "Processing worker updates...")
Answer = tuple[int, str]  # the status and the message of a reply


class ManagedModels:
    """The models of one server. All methods run on the event loop's thread, and may raise RequestError."""

    def __init__(
        self,
        registry: MultiModelRegistry,
        repository: RegisteredRepository,
        files: StoreFiles,
        config: ServerConfig,
    ) -> None:
        self._registry = registry
        self._repository = repository
        self._files = files
        self._config = config
        self._urls: dict[tuple[str, str | None], str] = {}  # the models that this API has registered -> their URLs
        self._registering: set[tuple[str, str]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- queries ---

    def urls(self) -> dict[str, str]:
        """Returns the names of all models, each with the URL of its default version's archive."""
        return {model.name: self._url(model) for model in default_models(self._registry)}

    def find(self, name: str, version: str | None) -> MLModel:
        """Returns the model. Raises RequestError if this package has no such model."""
        return find_accepted(self._registry, name, version, lambda model: model is not None)

    def versions(self, name: str) -> list[MLModel]:
        """Returns all versions of a model. Raises RequestError if there is no such model."""
        self.find(name, None)
        return [model for model in all_models(self._registry) if model.name == name]

    def describe(self, model: MLModel) -> dict[str, Any]:
        """Returns TorchServe's description of a model. It lists no workers for a model that is loading or has no
        handler.
        """
        try:
            workers = model.describe_workers() if is_ours(model) else {"workers": []}
        except NotServing:
            workers = {"workers": []}
        return {
            "modelName": model.name,
            **({"modelVersion": model.version} if model.version else {}),
            "modelUrl": self._url(model),
            "loadedAtStartup": (model.name, model.version) not in self._urls,
            **workers,
        }

    def _url(self, model: MLModel) -> str:
        parameters = model.settings.parameters
        uri = parameters.uri if parameters is not None else None
        return self._urls.get((model.name, model.version)) or self._files.url_of(uri or "")

    # --- changes ---

    async def register(self, given: Mapping[str, Any]) -> Answer:
        """Loads a model from the archive that the request names. Returns the status and the message."""
        asked = read_registration(given)
        path = await in_thread(lambda: self._files.fetch(asked.url))
        try:
            described = await in_thread(lambda: registered_settings(asked, path, self._config))
            name, parameters = described["name"], described["parameters"]
            version, extra = parameters["version"], parameters["extra"]
            self._reserve(name, version)
        except BaseException:
            await self._remove_download(asked.url)
            raise
        self._keep_default(name, extra)
        loading = self._run(self._load(name, version, described, asked.url))
        workers = extra["minWorkers"]
        if workers and not asked.synchronous:
            return ACCEPTED
        await asyncio.shield(loading)
        message = f'Model "{name}" Version: {version} registered with {workers} initial workers'
        return 200, message if workers else f"{message}. Use scale workers API to add workers for the model."

    async def scale(
        self, name: str, version: str | None, min_workers: int, max_workers: int, grace: float | None
    ) -> None:
        """Sets the minimum and the maximum number of workers. Workers that must end have ``grace`` seconds to finish
        their requests; None means no limit.

        Returns when all workers that should start or end have done so. Raises ManagementRefusal if a worker cannot be
        started.
        """
        model = self._find_scalable(name, version)
        try:
            await model.scale_workers(min_workers, max_workers, grace)
        except LoadFailed as error:
            raise internal(
                f"Failed to start workers for model {name} version: {version or model.version}: {error}"
            ) from None

    def scale_later(
        self, name: str, version: str | None, min_workers: int, max_workers: int, grace: float | None
    ) -> None:
        """Scales in the background and returns at once. A failure is logged."""
        self._find_scalable(name, version)
        self._run(self.scale(name, version, min_workers, max_workers, grace))

    def set_default(self, name: str, version: str) -> None:
        """Makes a version the default of its model."""
        registry = versions_of(self._registry, name)
        if registry is None or registry.default is None:
            raise NoSuchModel(name)
        model = find_model(self._registry, name, version) if version else None
        if model is None:
            raise ManagementRefusal(
                404, "ModelVersionNotFoundException", f"Model version {version} does not exist for model {name}"
            )
        if not registry.default.version:
            message = (
                f"The default of model {name} has no version, so no request could name it if it were not the default"
            )
            raise ManagementRefusal(409, "ConflictStatusException", message)
        default_version.mark(registry, model)

    async def unregister(self, name: str, version: str | None) -> None:
        """Unregisters a model. Returns when the model's requests in flight have ended, at the latest when the server's
        ``drain_grace`` is over.
        """
        model = self.find(name, version)
        if model is find_model(self._registry, name, None) and len(self.versions(name)) > 1:
            raise ManagementRefusal(
                403, "InvalidModelVersionException", f"Cannot remove default version for model {name}"
            )
        try:
            await asyncio.shield(self._run(self._unload(name, model.version)))
        except ModelNotFound:  # another request has just unregistered it
            raise no_model(f"Model not found: {name}") from None

    def _find_scalable(self, name: str, version: str | None) -> HandlerModel:
        model: Any = self.find(name, version)
        if not isinstance(model, HandlerModel):
            raise bad_request(f"{name} has no workers, because it has no TorchServe handler")
        return model

    def _reserve(self, name: str, version: str) -> None:
        """Reserves a version, so that a concurrent request for the same version is refused before it loads anything."""
        if (name, version) in self._registering or find_model(self._registry, name, version) is not None:
            message = f"Model version {version} is already registered for model {name}"
            raise ManagementRefusal(409, "ConflictStatusException", message)
        self._registering.add((name, version))

    def _keep_default(self, name: str, extra: dict[str, Any]) -> None:
        """Marks the first version of a model as its default, as in TorchServe."""
        default, versions = find_model(self._registry, name, None), versions_of(self._registry, name)
        if default is None or versions is None:
            extra[default_version.DEFAULT_VERSION] = True
        else:
            default_version.mark(versions, default)

    async def _load(self, name: str, version: str, described: Mapping[str, Any], url: str) -> None:
        settings = ModelSettings(**described)
        self._urls[name, version] = url
        try:
            await self._registry.load(settings)
            self._repository.add(name, version, settings)
        except Exception as error:
            self._urls.pop((name, version), None)
            await self._remove_download(url)
            if not isinstance(error, MLServerError):
                raise
            raise internal(f"Failed to start workers for model {name} version: {version}: {error}") from None
        finally:
            self._registering.discard((name, version))

    async def _unload(self, name: str, version: str | None) -> None:
        await self._registry.unload_version(name, version)
        self._repository.remove(name, version or "")
        url = self._urls.pop((name, version), None)
        if url is not None:
            await self._remove_download(url)

    async def _remove_download(self, url: str) -> None:
        await in_thread(lambda: self._files.remove_download(url))

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a change as a task, so that it completes even if its client disconnects."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error(f"Management API: {log_text(error)}")
