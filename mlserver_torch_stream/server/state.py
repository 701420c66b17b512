"""The objects that a server has once: its lifecycle, keys, metrics, and the sinks of its requests' reports.

``server_state`` is for what MLServer builds and gives no object of its own: runtimes, at each load anew, and the model
repository. All else gets the state, or the part that it needs, passed. Two objects of this kind are elsewhere, because
the rooms that use them do not import ``server``: ``engine.shared_pool.PROCESS`` and
``handlers.pool.handler_metrics.HANDLER_METRICS``.
"""

from __future__ import annotations

from prometheus_client import REGISTRY

from mlserver_torch_stream.engine.shared_pool import PROCESS
from mlserver_torch_stream.server.access.access_control import AccessControl
from mlserver_torch_stream.server.host import process_object
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.lifecycle.registry_lock import RegistryLock
from mlserver_torch_stream.server.observability.metrics import TokenMetrics, WeightsMetrics
from mlserver_torch_stream.server.observability.request_metrics import ClientLoad, EngineMetrics, RequestMetrics
from mlserver_torch_stream.server.observability.request_observer import RequestReports, RequestSinks
from mlserver_torch_stream.server.options import read_options


class ServerState:
    """Made once in a process, as are signals, prometheus_client's registry and MLServer's registry of models."""

    def __init__(self) -> None:
        self.options = read_options({})  # read when a REST server is extended
        self.lifecycle = Lifecycle()
        self.access = AccessControl()
        self.registry_lock = RegistryLock(self.lifecycle)
        self.engine_metrics = EngineMetrics()
        self.request_metrics = RequestMetrics()
        self.token_metrics = TokenMetrics(self.engine_metrics, self.request_metrics)
        self.weights_metrics = WeightsMetrics(PROCESS)
        self.sinks = RequestSinks()
        self.clients = ClientLoad()
        self.reports = RequestReports(self.request_metrics, self.sinks, self.clients)
        for collector in (self.token_metrics, self.weights_metrics):
            REGISTRY.register(collector)  # which refuses a second collector of the same names


def server_state() -> ServerState:
    """The state of this process's server, made at the first call."""
    state: ServerState = process_object(ServerState)
    return state
