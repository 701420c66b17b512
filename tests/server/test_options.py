"""The operator's options are read from the environment, and an error names a wrong one."""

import pytest

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.server.options import read_options


def test_options_come_from_the_environment() -> None:
    options = read_options({"MLSERVER_TORCH_STREAM_DRAIN_GRACE": "2.5", "MLSERVER_TORCH_STREAM_LOG_PROMPTS": "true"})
    assert options.drain_grace == 2.5 and options.log_prompts


def test_kubernetes_does_not_set_the_port_of_triton() -> None:
    """It would set the variable for a Service mlserver-torch-stream-triton-grpc, if the name ended in PORT."""
    assert read_options({"MLSERVER_TORCH_STREAM_GRPC_PORT_TRITON": "8001"}).grpc_port_triton == 8001
    assert read_options({"MLSERVER_TORCH_STREAM_TRITON_GRPC_PORT": "tcp://10.0.0.1:8001"}).grpc_port_triton == 0


def test_what_others_read_under_the_same_prefix_is_left_alone() -> None:
    assert read_options({"MLSERVER_TORCH_STREAM_CACHE": "somewhere", "PATH": "x"}) == read_options({})


@pytest.mark.parametrize("service", ["MLSERVER_TORCH_STREAM", "MLSERVER_TORCH_STREAM_CANARY"])
def test_what_kubernetes_says_of_a_service_of_our_name_is_no_option(service: str) -> None:
    links = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_8080_TCP", "PORT_8080_TCP_ADDR")
    assert read_options({f"{service}_{link}": "10.0.0.1" for link in links}) == read_options({})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MLSERVER_TORCH_STREAM_DRAIN_GRAZE", "1", "did you mean MLSERVER_TORCH_STREAM_DRAIN_GRACE"),
        ("MLSERVER_TORCH_STREAM_SSE_PING_INTERVAL", "soon", "MLSERVER_TORCH_STREAM_SSE_PING_INTERVAL"),
        ("MLSERVER_TORCH_STREAM_MAX_BODY_BYTES", "-1", "greater than 0"),
        ("MLSERVER_TORCH_STREAM_GRPC_PORT_TRITON", "65536", "less than or equal to 65535"),
        (
            "MLSERVER_TORCH_STREAM_GRPC_MANAGEMENT_PORT_TORCHSERVE",
            "7071",
            "GRPC_MANAGEMENT_PORT_TORCHSERVE: was removed: .* set MLSERVER_TORCH_STREAM_MANAGEMENT_PORT_TORCHSERVE",
        ),
    ],
)
def test_a_wrong_option_is_named(name: str, value: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        read_options({name: value})
