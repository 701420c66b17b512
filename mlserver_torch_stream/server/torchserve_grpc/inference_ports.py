"""The ports of TorchServe's gRPC service of inference: MLServer's own, and another if the options name one.

Knows nothing of the service's methods.
"""

from __future__ import annotations

from mlserver.rest.server import RESTServer

from mlserver_torch_stream.server.grpc_port import mlservers_listener, open_port
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.torchserve_grpc.inference_service import InferenceService


async def install(server: RESTServer, options: ServerOptions, lifecycle: Lifecycle) -> None:
    """Raises ModelNotLoaded if the port cannot be had."""
    service = InferenceService(server._data_plane, lifecycle, options.stalled_reader_timeout)
    listener = mlservers_listener(server)
    if listener is not None:
        listener.add_generic_rpc_handlers((service.handler(),))
    port = options.grpc_port_torchserve
    if port:
        name = "TorchServe's gRPC service"
        await open_port(server, lifecycle, port, "grpc_port_torchserve", name, service.handler())
