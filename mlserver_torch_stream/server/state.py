"""Holds the objects that exist once in a server: the lifecycle, the keys, the metrics, and the sinks of the requests'
reports.

Runtimes and the model repository, which MLServer creates without passing them an object, call ``server_state``. All
other code gets the state, or the part that it needs, as an argument. Two more objects exist once in a process, in
packages that do not import ``server``: ``engine.shared_pool.PROCESS`` and
``handlers.pool.handler_metrics.HANDLER_METRICS``.
"""

from __future__ import annotations

from prometheus_client import REGISTRY

from mlserver_torch_stream.engine.shared_pool import PROCESS
from mlserver_torch_stream.server.access.access_control import AccessControl
from mlserver_torch_stream.server.host import process_object
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.lifecycle.registry_lock import RegistryLock
from mlserver_torch_stream.server.observability.metrics import EngineMetrics, TokenMetrics, WeightsMetrics
from mlserver_torch_stream.server.observability.request_observer import (
    ClientLoad,
    RequestMetrics,
    RequestReports,
    RequestSinks,
)
from mlserver_torch_stream.server.options import read_options


class ServerState:
    """The state of a server. A process has one, as it has one set of signal handlers and one Prometheus registry."""

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
            REGISTRY.register(collector)  # refuses a second collector with the same names


def server_state() -> ServerState:
    """Returns the state of this process's server, which is created at the first call."""
    state: ServerState = process_object(ServerState)
    return state
