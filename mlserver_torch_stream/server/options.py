"""Reads the options of the whole server from ``MLSERVER_TORCH_STREAM_*`` in the environment.

Knows nothing of models: ``settings`` has the settings of one model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlserver_torch_stream.did_you_mean import did_you_mean
from mlserver_torch_stream.errors import SettingsError

PREFIX = "MLSERVER_TORCH_STREAM_"
# Other modules read these under the same prefix: the folder of converted models, faults for tests, which kernels.
_ELSEWHERE = frozenset({"cache", "faults", "kernel"})
# Kubernetes sets such variables in every pod for a Service whose name begins with mlserver-torch-stream.
_SERVICE_LINK = re.compile(r"(.+_)?(service_host|service_port(_.+)?|port(_\d+_(tcp|udp|sctp)(_(proto|port|addr))?)?)")


class ServerOptions(BaseModel):
    """All times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drain_delay: float = Field(0.0, ge=0)  # after SIGTERM: not ready, still accepting requests
    drain_grace: float = Field(30.0, ge=0)  # then, for the streams in flight; the rest ends with `abort`
    max_body_bytes: int = Field(16 * 2**20, gt=0)  # of a REST request, after decompression
    sse_ping_interval: float = Field(15.0, ge=0)  # between ": ping" comments on a silent REST stream; 0: none
    stalled_reader_timeout: float = Field(60.0, ge=0)  # then a client that reads nothing is cut off; 0: none
    piece_timeout: float = Field(60.0, ge=0)  # between the pieces of a prompt over gRPC, or of a file; 0: none
    # Not `triton_grpc_port`: Kubernetes sets variables that end in _PORT.
    grpc_port_triton: int = Field(0, ge=0, le=65535)  # Triton's gRPC service for its clients' streams; 0: none
    grpc_port_torchserve: int = Field(0, ge=0, le=65535)  # TorchServe's gRPC service on a port of its own; 0: none
    management_port_torchserve: int = Field(0, ge=0, le=65535)  # TorchServe's management API; 0: there is none
    grpc_management_port_torchserve: int = Field(0, ge=0, le=65535)  # the same over gRPC; 0: there is none
    management_address: str = "127.0.0.1"  # of these ports
    management_token: str = ""  # what a request to them has in its Authorization header
    management_token_file: str = ""  # or the file that has it
    disable_token_authorization: bool = False  # true: a request to them needs no token
    enable_model_api: bool = True  # false: they neither register nor unregister a model
    model_store: str = ""  # the folder of the archives that they register; empty: they register none
    torchserve_config: str = ""  # config.properties, whose defaults of models those have; empty: TorchServe's own
    allowed_urls: str = ""  # patterns of the URLs that they download archives from, with commas between them
    batch_store: str = ""  # folder or bucket of the files and batches of OpenAI's API; empty: there are none
    batch_max_file_bytes: int = Field(200 * 2**20, gt=0)  # of one file
    page: bool = False  # the page at /, on which a person talks to the models
    log_requests: bool = True  # one line per request, never its prompt
    log_prompts: bool = False  # the prompt and the answer too
    api_keys_file: str = ""  # one key a line, of which every request must send one; empty: no key is asked for
    metrics_without_key: bool = False
    repository_without_key: bool = False  # the list of models, their load and unload
    model_roots: str = ""  # read by model_source: folders that local models must lie in; empty: any
    tls_cert_file: str = ""  # PEM, with the chain; every port of the server speaks TLS
    tls_key_file: str = ""
    tls_client_ca_file: str = ""  # clients must show a certificate of this authority; empty: they need none
    vllm_metric_names: bool = False  # the metrics are exported under vLLM's names too
    torchserve_metric_names: bool = False  # and under TorchServe's


def read_options(environ: Mapping[str, str] | None = None) -> ServerOptions:
    """Raises SettingsError, which names the variable."""
    environ = os.environ if environ is None else environ
    given = {key[len(PREFIX) :].lower(): value for key, value in environ.items() if key.startswith(PREFIX)}
    ours = {key: value for key, value in given.items() if key not in _ELSEWHERE and not _SERVICE_LINK.fullmatch(key)}
    try:
        return ServerOptions.model_validate(ours)
    except ValidationError as error:
        raise SettingsError(_explain(error)) from None


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    key = str(first["loc"][0])
    name = PREFIX + key.upper()
    if first["type"] != "extra_forbidden":
        return f"{name}: {first['msg']}, got {first['input']!r}"
    known = [*ServerOptions.model_fields, *_ELSEWHERE]
    return f"{name}: unknown variable{did_you_mean(key, known, lambda near: PREFIX + near.upper())}"
