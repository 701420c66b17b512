"""Implements the operations of TorchServe's management API, and checks its token."""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from mlserver.logging import logger

from mlserver_torch_stream.errors import NotServing, SettingsError
from mlserver_torch_stream.handlers.config.properties import is_true
from mlserver_torch_stream.handlers.config.registration import whole_number
from mlserver_torch_stream.handlers.config.store_files import ManagementRefusal, bad_request
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.management.managed_models import ACCEPTED, Answer, ManagedModels
from mlserver_torch_stream.server.observability.request_observer import EndpointKind
from mlserver_torch_stream.server.options import PREFIX, ServerOptions
from mlserver_torch_stream.server.request import HandlerModel

_MAX_LISTED = 100
_MAX_WORKERS = 1024  # all are processes that are started at the same time
_MAX_TIMEOUT_S = 2**31 - 1  # as in TorchServe
_ALL = "all"


class ManagementCalls:
    """The operations. ``registers`` says whether models may be registered and unregistered.

    All methods raise RequestError; methods that change a model raise NotServing while the server shuts down.
    """

    def __init__(self, models: ManagedModels, lifecycle: Lifecycle, *, registers: bool) -> None:
        self.models = models
        self._registers = registers
        self._lifecycle = lifecycle

    def list(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a page of the list of models."""
        limit = whole_number(given, "limit") if "limit" in given else _MAX_LISTED
        limit = limit if 0 <= limit <= _MAX_LISTED else _MAX_LISTED
        start = max(0, whole_number(given, "next_page_token")) if "next_page_token" in given else 0
        found = [{"modelName": name, "modelUrl": url} for name, url in self.models.urls().items()]
        end = start + limit
        more = {"nextPageToken": str(end)} if end <= len(found) else {}
        return {**more, "models": found[start:end]}

    async def describe(
        self, name: str, version: str | None, customized: bool, headers: Mapping[str, str]
    ) -> Descriptions:
        """Describes a model's versions. With ``customized``, adds the handler's own description.

        The handler sees ``headers``.
        """
        if version == _ALL:
            return [self.models.describe(model) for model in self.models.versions(name)]
        model = self.models.find(name, version)
        described = self.models.describe(model)
        if customized:
            described["customizedMetadata"] = await _customized(model, headers)
        return [described]

    async def register(self, given: Mapping[str, Any]) -> Answer:
        """Registers a model. Returns the status and the message."""
        self._refuse_at_shutdown()
        self._refuse_without_model_api()
        return await self.models.register(given)

    async def scale(self, given: Mapping[str, Any], name: str, version: str | None) -> Answer:
        """Sets the minimum and maximum number of a model's workers. Returns the status and the message."""
        self._refuse_at_shutdown()
        min_workers = whole_number(given, "min_worker") if "min_worker" in given else 1
        max_workers = whole_number(given, "max_worker") if "max_worker" in given else min_workers
        timeout = whole_number(given, "timeout") if "timeout" in given else -1
        if min_workers < 0:
            raise bad_request(f"min_worker: must not be below 0, got {min_workers}")
        if min_workers > _MAX_WORKERS:
            raise bad_request(f"min_worker: must not be above {_MAX_WORKERS}")
        if max_workers < min_workers:
            raise bad_request("max_worker cannot be less than min_worker.")
        if timeout > _MAX_TIMEOUT_S:
            raise bad_request(f"timeout: must not be above {_MAX_TIMEOUT_S} seconds")
        grace = None if timeout < 0 else float(timeout)
        if not is_true(given.get("synchronous")):
            self.models.scale_later(name, version, min_workers, max_workers, grace)
            return ACCEPTED
        await self.models.scale(name, version, min_workers, max_workers, grace)
        of = f"{name}, version: {version}" if version is not None else name
        return 200, f"Workers scaled to {min_workers} for model: {of}"

    def set_default(self, name: str, version: str) -> str:
        """Makes a version the default of its model. Returns the message."""
        self._refuse_at_shutdown()
        self.models.set_default(name, version)
        return f'Default version successfully updated for model "{name}" to "{version}"'

    async def unregister(self, name: str, version: str | None) -> str:
        """Unregisters a model. Returns the message."""
        self._refuse_at_shutdown()
        self._refuse_without_model_api()
        await self.models.unregister(name, version)
        return f'Model "{name}" unregistered'

    def _refuse_at_shutdown(self) -> None:
        if self._lifecycle.shutdown_reason is not None:
            raise NotServing(self._lifecycle.shutdown_reason)

    def _refuse_without_model_api(self) -> None:
        if not self._registers:
            raise ManagementRefusal(405, "MethodNotAllowedException", "Model API disabled (enable_model_api)")


Descriptions = list[dict[str, Any]]


async def _customized(model: Any, headers: Mapping[str, str]) -> dict[str, Any]:
    """Returns the handler's own description, as in TorchServe; an empty dict if it is not a JSON object. Raises
    RequestError if the handler fails.
    """
    if not isinstance(model, HandlerModel):
        return {}
    reply = model.open_prediction((), {**headers, "describe": "True"}, str(uuid4()), EndpointKind.REST_UNARY)
    try:
        said = b"".join([piece.value async for piece in reply.pieces()])
    finally:
        reply.close()
    try:
        found = json.loads(said)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        logger.warning(f"Model '{model.name}': its customized metadata is not a JSON object")
        return {}
    return found


_BEARER = re.compile(r"Bearer\s+(\S+)")


def read_token(options: ServerOptions) -> str | None:
    """Returns the token that requests must contain; None if no token is needed.

    Raises SettingsError if no token is set and tokens are not switched off.
    """
    if options.disable_token_authorization:
        return None
    token = options.management_token
    if options.management_token_file:
        try:
            token = Path(options.management_token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{PREFIX}MANAGEMENT_TOKEN_FILE: cannot be read: {error}") from None
    if not token:
        raise SettingsError(
            f"the management API needs a token: set {PREFIX}MANAGEMENT_TOKEN or {PREFIX}MANAGEMENT_TOKEN_FILE, "
            f"or switch tokens off with {PREFIX}DISABLE_TOKEN_AUTHORIZATION=true"
        )
    return token


def check_token(expected: str | None, authorization: str | None) -> None:
    """Raises ManagementRefusal unless ``authorization``, the request's header, has the expected token."""
    if expected is None:
        return
    match = _BEARER.fullmatch(authorization or "")
    if match is None or not hmac.compare_digest(match[1].encode(), expected.encode()):
        message = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
        raise ManagementRefusal(400, "InvalidKeyException", message)
