"""Creates the mutable objects that exist once in a process; no other module of ``server`` creates such an object.

They live at module level because nothing else lives long enough: MLServer constructs a runtime anew at each load,
reloads the module that ``implementation`` names whenever it resolves that name, and gives a runtime no object of its
own. MLServer imports this module once. Signals, prometheus_client's registry and MLServer's model registry, which these
objects stand for, also exist once in a process.

Classes take what they need as constructor arguments; only the functions that MLServer calls without any (the patches,
the runtimes and the observers of requests) read these names. Two objects of this kind are elsewhere, because the rooms
that use them do not import ``server``: ``engine.shared_pool.PROCESS`` and
``torchserve.handler_metrics.HANDLER_METRICS``.
"""

from __future__ import annotations

from prometheus_client import REGISTRY

from mlserver_torch_stream.engine.shared_pool import PROCESS
from mlserver_torch_stream.server.access.access_control import AccessControl
from mlserver_torch_stream.server.batches.row_slots import ClientLoad
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.lifecycle.registry_lock import RegistryLock
from mlserver_torch_stream.server.observability.metrics import TokenMetrics, WeightsMetrics
from mlserver_torch_stream.server.observability.request_log import RequestSinks
from mlserver_torch_stream.server.observability.request_metrics import EngineMetrics, RequestMetrics

LIFECYCLE = Lifecycle()
ACCESS = AccessControl()
REGISTRY_LOCK = RegistryLock(LIFECYCLE)

ENGINE_METRICS = EngineMetrics()
REQUEST_METRICS = RequestMetrics()
TOKEN_METRICS = TokenMetrics(ENGINE_METRICS, REQUEST_METRICS)
WEIGHTS_METRICS = WeightsMetrics(PROCESS)
REQUEST_SINKS = RequestSinks()
CLIENT_LOAD = ClientLoad()

# The registry refuses a second collector of the same names, so they are registered where they are created.
REGISTRY.register(TOKEN_METRICS)
REGISTRY.register(WEIGHTS_METRICS)
