"""What a batch over ``/v1/batches`` costs clients: the time to the first token beside it, against the same without.

Knows our server only.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx

from benchmarks import load
from benchmarks.answers import Ask, check_all
from benchmarks.figures import spread
from benchmarks.http_endpoint import HOST
from benchmarks.prompts import Prompts
from benchmarks.servers import Live

_GOAL = 1.5
_PROMPT_TOKENS = 128
_ROW_TOKENS = 64
_STARTED_S = 120.0
_BUSY = ("validating", "in_progress")


class BatchTooShort(Exception):
    """The batch did not run for as long as the clients asked."""


async def measure(live: Live, prompts: Prompts, model: str, requests: int, rows: int) -> dict[str, Any]:
    alone = await _first_tokens(live, prompts, "alone", requests)
    with httpx.Client(base_url=f"http://{HOST}:{live.http_port}/v1", timeout=60) as client:
        batch = _create(client, prompts, model, rows)
        end = time.monotonic() + _STARTED_S
        while (found := client.get(f"/batches/{batch}").json())["request_counts"]["completed"] < 2:
            if time.monotonic() > end or found["status"] not in _BUSY:
                failed = client.get(f"/files/{found['error_file_id']}/content").text[:500]
                raise BatchTooShort(f"the batch is {found['status']}, two rows are not completed: {failed}")
            await asyncio.sleep(0.05)
        beside = await _first_tokens(live, prompts, "beside", requests)
        found = client.get(f"/batches/{batch}").json()
        client.post(f"/batches/{batch}/cancel")
    if found["status"] not in _BUSY:
        raise BatchTooShort(f"{rows} rows ended before {requests} requests: the batch is {found['status']}")
    return {
        "requests": requests,
        "rows": found["request_counts"]["completed"],
        **spread("alone", alone),
        **spread("beside", beside),
    }


def _create(client: httpx.Client, prompts: Prompts, model: str, rows: int) -> str:
    lines = []
    for index in range(rows):
        prompt, _ = prompts.text(_PROMPT_TOKENS, "batch", index)
        body = {"model": model, "prompt": prompt, "max_tokens": _ROW_TOKENS, "ignore_eos": True, "temperature": 0}
        lines.append(json.dumps({"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body}))
    given = client.post("/files", data={"purpose": "batch"}, files={"file": ("rows.jsonl", "\n".join(lines).encode())})
    asked = {"input_file_id": given.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    created = client.post("/batches", json=asked)
    created.raise_for_status()
    return str(created.json()["id"])


async def _first_tokens(live: Live, prompts: Prompts, label: str, requests: int) -> list[float]:
    endpoint = live.endpoints["rest"]
    asks = [Ask(*prompts.text(_PROMPT_TOKENS, "beside batch", label, index), 16) for index in range(requests)]
    answers = [endpoint.read(each) for each in await load.in_turn(endpoint, asks)]
    check_all(asks, answers)
    return [answer.ttft for answer in answers]


def lines(found: dict[str, Any]) -> list[str]:
    ratio = found["beside_p50_ms"] / found["alone_p50_ms"]
    return [
        f"time to the first token of {found['requests']} requests in turn: p50 {found['alone_p50_ms']:.0f} ms alone, "
        f"{found['beside_p50_ms']:.0f} ms beside a batch, ratio {ratio:.2f} ({'met' if ratio <= _GOAL else 'missed'}: "
        f"goal <= {_GOAL}); p99 {found['alone_p99_ms']:.0f} and {found['beside_p99_ms']:.0f} ms; the batch completed "
        f"{found['rows']} rows meanwhile"
    ]
