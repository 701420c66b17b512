"""The fixtures of MLServer's own tests/conftest.py that the tests of the patches in deploy/upstream/ use.

The test of the patches copies this file beside them as their conftest.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY, CollectorRegistry
from starlette_exporter import PrometheusMiddleware


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def prometheus_registry() -> Iterator[CollectorRegistry]:
    """MLServer registers its metrics anew with each server, but a process can register each metric only once."""
    yield REGISTRY
    for collector in set(REGISTRY._names_to_collectors.values()):
        REGISTRY.unregister(collector)
    PrometheusMiddleware._metrics.clear()
