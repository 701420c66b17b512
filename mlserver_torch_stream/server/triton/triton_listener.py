"""The port of Triton's gRPC service. Knows nothing of the service's methods."""

from __future__ import annotations

from mlserver.grpc.servicers import InferenceServicer
from mlserver.rest.server import RESTServer

from mlserver_torch_stream.server.grpc_port import open_port
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.triton.triton_servicer import TritonServicer


async def install(server: RESTServer, options: ServerOptions, lifecycle: Lifecycle) -> None:
    """Opens the port if there is to be one. Raises ModelNotLoaded if it cannot be had."""
    port = options.grpc_port_triton
    if not port:
        return
    inference = InferenceServicer(server._data_plane, server._model_repository_handlers)
    handler = TritonServicer(inference, options.stalled_reader_timeout).handler()
    await open_port(server, lifecycle, port, "grpc_port_triton", "Triton's gRPC service", handler)
