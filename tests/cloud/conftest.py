"""One moto for all tests, each with its own bucket, and a scripted model server for each test."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import plain_http
from tests.cloud.models import ModelServer, model_server
from tests.cloud.moto import moto


@pytest.fixture(autouse=True)
def epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives all runs the same time, so that equal answers in two outputs are equal bytes."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


@pytest.fixture(scope="session")
def aws() -> Iterator[dict[str, str]]:
    with moto() as environment:
        yield environment


@pytest.fixture
def bucket(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes an empty bucket and returns its name; the environment points to the server."""
    for name, value in aws.items():
        monkeypatch.setenv(name, value)
    name = f"b-{uuid.uuid4().hex[:12]}"
    plain_http.put(f"{aws['AWS_ENDPOINT_URL']}/{name}").raise_for_status()
    return name


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with model_server() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of 37 rows in JSONL objects and text files; rows 5 and 20 fail, row 9 is malformed."""
    (tmp_path / "in" / "deep").mkdir(parents=True)
    lines = [
        json.dumps({"custom_id": f"r{i}", "prompt": f"{'fail' if i in (5, 20) else 'row'} {i}"}) for i in range(30)
    ]
    lines[9] = "{broken"
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines[:13]) + "\n\n")
    (tmp_path / "in" / "deep" / "b.jsonl").write_text("\n".join(lines[13:]))
    for i in range(7):
        (tmp_path / "in" / f"z{i}.txt").write_text(f"text {i}")
    return tmp_path
