"""Fixtures for the V2 protocol. Needs no engine."""

from __future__ import annotations

import pytest

from mlserver_torch_stream.types import ModelInfo
from tests.protocol.wire import Wire, over_grpc, over_raw_grpc, over_rest


@pytest.fixture(params=[over_rest, over_grpc, over_raw_grpc], ids=["rest", "grpc", "grpc-raw"])
def wire(request: pytest.FixtureRequest) -> Wire:
    """Each transport of a request."""
    way: Wire = request.param
    return way


@pytest.fixture
def info() -> ModelInfo:
    return ModelInfo(
        vocab_size=100,
        max_model_len=64,
        max_num_seqs=4,
        has_chat_template=True,
        tool_parser="hermes",
        template_arguments=frozenset({"tools"}),
    )
