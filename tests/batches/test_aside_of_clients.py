"""Rows of a batch beside clients' requests: one slot stays free, and clients come first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import httpx
import pytest

from mlserver_torch_stream import client
from tests import plain_http
from tests.batches.api import Api, row
from tests.server.harness import Server

_SLOTS = 4  # of ``tiny``


@contextmanager
def _long_batch(api: Api) -> Iterator[str]:
    """A batch of rows that run as long as the block does."""
    batch = api.create([row(n, max_tokens=900, ignore_eos=True) for n in range(2 * _SLOTS)])["id"]
    try:
        yield batch
    finally:
        api.cancel(batch)
        api.wait(batch)


def _ask(server: Server, model: str = "tiny", **body: object) -> httpx.Response:
    asked = {"text_input": "hello", "max_tokens": 1, "ignore_eos": True, **body}
    return plain_http.post(f"{server.url}/v2/models/{model}/generate", json=asked, timeout=60)


@pytest.mark.long
def test_a_batch_leaves_one_slot_free_and_a_client_is_answered_before_any_row_ends(
    api: Api, batch_server: Server
) -> None:
    with _long_batch(api) as batch:
        batch_server.wait_for("tiny", lambda found: found["running_sequences"] == _SLOTS - 1)
        assert _ask(batch_server).status_code == 200
        found = batch_server.counters("tiny")
        assert found["running_sequences"] == _SLOTS - 1 and found["waiting_requests"] == 0
        assert api.batch(batch)["request_counts"]["completed"] == 0


def test_no_row_starts_while_clients_hold_all_slots_but_one(api: Api, batch_server: Server) -> None:
    with ExitStack() as clients:
        for _ in range(_SLOTS - 1):
            stream = client.stream(batch_server.url, "tiny", "hello", max_tokens=900, ignore_eos=True)
            assert not next(clients.enter_context(closing(stream))).final
        batch = api.create([row(0)])["id"]
        api.wait(batch, "in_progress")
        found = batch_server.counters("tiny")
        assert found["running_sequences"] == _SLOTS - 1 and found["waiting_requests"] == 0
    assert api.wait(batch)["request_counts"]["completed"] == 1


@pytest.mark.long
def test_the_prompt_of_a_client_is_prefilled_before_the_rest_of_a_row(api: Api, batch_server: Server) -> None:
    long = [{"role": "user", "content": "x1y2z3 " * 100}]
    batch = api.create([row(0, model="chunked", messages=long, max_tokens=2, ignore_eos=True)])["id"]
    batch_server.wait_for("chunked", lambda found: found["prefilling_requests"] == 1)
    assert _ask(batch_server, "chunked").status_code == 200
    assert batch_server.counters("chunked")["generation_tokens"] == 1  # the client's; the row has none yet
    assert api.wait(batch)["request_counts"]["completed"] == 1
