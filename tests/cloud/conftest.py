"""One moto for all tests, each with a bucket of its own, and a scripted model server for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.cloud_moto import moto
from tests.cloud.models import ModelServer, model_server


@pytest.fixture(scope="session")
def aws() -> Iterator[dict[str, str]]:
    with moto() as environment:
        yield environment


@pytest.fixture
def bucket(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an empty bucket; the environment points to it."""
    for name, value in aws.items():
        monkeypatch.setenv(name, value)
    name = f"b-{uuid.uuid4().hex[:12]}"
    httpx.put(f"{aws['AWS_ENDPOINT_URL']}/{name}").raise_for_status()
    return name


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with model_server() as running:
        yield running
