"""Reads the options of the whole server from ``MLSERVER_TORCH_STREAM_*`` in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mlserver_torch_stream.did_you_mean import did_you_mean
from mlserver_torch_stream.errors import SettingsError

# Seconds from the end of ``stalled_reader_timeout`` until the reader is given up. A blocked event loop first has to
# process what the reader did meanwhile.
LAST_LOOK_S = 0.1
PREFIX = "MLSERVER_TORCH_STREAM_"
# Other modules read these variables: the folder of converted models, faults for tests, the choice of kernels.
_ELSEWHERE = frozenset({"cache", "faults", "kernel"})
_REMOVED = {
    "grpc_management_port_torchserve": "the management API is served only over REST; set "
    f"{PREFIX}MANAGEMENT_PORT_TORCHSERVE",
}
# Kubernetes sets such variables in every pod for a Service whose name begins with mlserver-torch-stream.
_SERVICE_LINK = re.compile(r"(.+_)?(service_host|service_port(_.+)?|port(_\d+_(tcp|udp|sctp)(_(proto|port|addr))?)?)")


class ServerOptions(BaseModel):
    """The options of the server. All times are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drain_delay: float = Field(0.0, ge=0)
    """Time after SIGTERM or SIGHUP in which the server reports that it is not ready but still accepts requests, so that
    routers stop sending to it."""
    drain_grace: float = Field(30.0, ge=0)
    """Time after the delay in which streams in flight may finish; the remaining ones end with `abort`."""
    max_body_bytes: int = Field(16 * 2**20, gt=0)
    """Largest body of a REST request, after decompression."""
    sse_ping_interval: float = Field(15.0, ge=0)
    """Time between comments on a REST stream that has nothing to send; 0 means no comments."""
    stalled_reader_timeout: float = Field(60.0, ge=0)
    """Time after which a client that reads nothing is disconnected; 0 means never."""
    piece_timeout: float = Field(60.0, ge=0)
    """Longest time between the pieces of a prompt (`stream_mode` `prompt`), of a file or of a REST request's body, and
    for the head of a REST request; 0 means no bound. While batches of a run are answered, its client may send nothing
    for longer."""
    # Not `triton_grpc_port`: Kubernetes sets variables that end in _PORT.
    grpc_port_triton: int = Field(0, ge=0, le=65535)
    """Port of [Triton's gRPC service](triton.md), on which Triton's clients can stream; 0 means no such port."""
    grpc_port_torchserve: int = Field(0, ge=0, le=65535)
    """A further port for [TorchServe's gRPC service](torchserve.md#torchserves-grpc-service), which is always on
    MLServer's gRPC port too; 0 means that there is no other port."""
    management_port_torchserve: int = Field(0, ge=0, le=65535)
    """Port of [TorchServe's management API](torchserve.md#the-management-api); 0 means no such port."""
    management_address: str = "127.0.0.1"
    """Address of the management API's port."""
    management_token: str = ""
    """Token that requests to the management API must send in `Authorization: Bearer`."""
    management_token_file: str = ""
    """File that contains this token."""
    disable_token_authorization: bool = False
    """True: requests to the management API need no token."""
    enable_model_api: bool = True
    """False: the management API neither registers nor unregisters a model."""
    model_store: str = ""
    """Folder of the archives that the management API registers; an empty value means none."""
    torchserve_config: str = ""
    """A config.properties whose [defaults for models](torchserve.md#the-management-api) apply to models that the
    management API registers; an empty value means TorchServe's defaults."""
    allowed_urls: str = ""
    """Regular expressions, separated by commas, one of which must match the whole URL of an archive that the management
    API downloads; an empty value means no downloads."""
    skip_failed_models: bool = False
    """True: the server starts without a model of this package that cannot be loaded, and logs why; false: it ends with
    status 1."""
    batch_store: str = ""
    """Folder or bucket of [files and batches](batches.md); an empty value means that `/v1/files` and `/v1/batches` do
    not exist.
    """
    batch_max_file_bytes: int = Field(200 * 2**20, gt=0)
    """Largest file of `/v1/files`."""
    unknown_parameters: Literal["refuse", "ignore"] = "refuse"
    """`refuse`: a request with an [unknown](openai.md#parameters) parameter gets an error; `ignore`: the parameter has
    no effect, and the answer's header `x-ignored-parameters` and the log name it."""
    model_aliases: str = ""
    """Further names of models, as `alias=model` separated by commas; `*` in an alias stands for any text, as in
    `claude-*=smollm2`."""
    page: bool = False
    """True: [a page](page.md) at `/` lets you chat with the models; `mlserver-torch-stream serve` and `make run` set
    this."""
    log_requests: bool = True
    """True: the log has one line for each request, without its prompt."""
    log_prompts: bool = False
    """True: the line of a request has the prompt and the answer too."""
    api_keys_file: str = ""
    """File of API keys; every request must send one of them ([security.md](security.md#keys)); an empty value means
    that no key is needed.
    """
    metrics_without_key: bool = False
    """True: the metrics need no key."""
    repository_without_key: bool = False
    """True: listing, loading and unloading models needs no key."""
    model_roots: str = ""
    """Folders, separated as in `PATH`, one of which must contain every local model, tokenizer, template and archive; an
    empty value means any folder."""
    vllm_python: str = ""
    """The Python interpreter of an environment with vLLM, for models whose settings name none
    ([engines.md](engines.md#install))."""
    runtime_lora_updating: bool = False
    """True: [`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`](engines.md#adapters) load and unload adapters."""
    lora_root: str = ""
    """The folder that must contain the adapters that `/v1/load_lora_adapter` loads; an empty value means that only hub
    ids are loaded.
    """
    tls_cert_file: str = ""
    """Certificate of all ports, with its chain, as PEM ([security.md](security.md#tls)); an empty value means no TLS.
    """
    tls_key_file: str = ""
    """The certificate's key, as PEM without a password."""
    tls_client_ca_file: str = ""
    """Certificate of the authority that must have signed the clients' certificates; an empty value means that clients
    need none.
    """
    vllm_metric_names: bool = False
    """True: the metrics have vLLM's names too."""
    torchserve_metric_names: bool = False
    """True: the metrics of requests and of handlers have [TorchServe's names](torchserve.md#metrics) too."""

    @field_validator("model_aliases")
    @classmethod
    def _check_aliases(cls, value: str) -> str:
        for pair in filter(None, value.split(",")):
            alias, _, model = (part.strip() for part in pair.partition("="))
            if not alias or not model:
                raise ValueError("must be pairs of alias=model, separated by commas")
        return value

    def model_of_alias(self, name: str) -> str:
        """Returns the model whose alias is ``name``, or ``name`` itself if it is not an alias."""
        for pair in filter(None, self.model_aliases.split(",")):
            alias, _, model = (part.strip() for part in pair.partition("="))
            if re.fullmatch(re.escape(alias).replace(r"\*", ".*"), name, re.DOTALL):
                return model
        return name


def read_options(environ: Mapping[str, str] | None = None) -> ServerOptions:
    """Reads the options from environment variables. Raises SettingsError, which names the variable."""
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
    if key in _REMOVED:
        return f"{name}: was removed: {_REMOVED[key]}"
    known = [*ServerOptions.model_fields, *_ELSEWHERE]
    return f"{name}: unknown variable{did_you_mean(key, known, lambda near: PREFIX + near.upper())}"
