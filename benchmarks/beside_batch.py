"""What a batch over ``/v1/batches`` costs clients: the time to the first token beside it, and without it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import httpx

from benchmarks import load
from benchmarks.answers import Ask, check_all
from benchmarks.figures import Figures, spread
from benchmarks.prompts import Prompts

if TYPE_CHECKING:
    from benchmarks.cases import Scale

_STARTED_S = 120.0
_BUSY = ("validating", "in_progress")


class BatchTooShort(Exception):
    """The batch did not run for as long as the clients asked."""


async def beside_batch(
    endpoint: load.Endpoint, scale: Scale, prompts: Prompts, requests: int, sweep: object
) -> Figures:
    """Raises BatchTooShort."""

    async def first_tokens(label: str) -> list[float]:
        texts = [prompts.text(scale.prompt_tokens, sweep, label, index) for index in range(requests)]
        asks = [Ask(*text, min(16, scale.new_tokens)) for text in texts]
        answers = [endpoint.read(each) for each in await load.in_turn(endpoint, asks)]
        check_all(asks, answers)
        return [answer.ttft for answer in answers]

    alone = await first_tokens("alone")
    with httpx.Client(base_url=f"http://127.0.0.1:{endpoint.port}/v1", timeout=60) as client:
        model = client.get("/models").json()["data"][0]["id"]
        batch = _create(client, [prompts.text(scale.prompt_tokens, "batch", row)[0] for row in range(scale.batch_rows)],
                        model, scale.new_tokens // 2)  # fmt: skip
        end = time.monotonic() + _STARTED_S
        while (found := client.get(f"/batches/{batch}").json())["request_counts"]["completed"] < 2:
            if time.monotonic() > end or found["status"] not in _BUSY:
                raise BatchTooShort(f"the batch is {found['status']}, two rows are not completed")
            await asyncio.sleep(0.05)
        beside = await first_tokens("beside")
        found = client.get(f"/batches/{batch}").json()
        client.post(f"/batches/{batch}/cancel")
    if found["status"] not in _BUSY:
        raise BatchTooShort(f"{scale.batch_rows} rows ended before {requests} requests")
    times = {**spread("alone", alone), **spread("beside", beside)}
    return {
        **times,
        "ratio": times["beside_p50_ms"] / times["alone_p50_ms"],
        "rows": found["request_counts"]["completed"],
    }


def _create(client: httpx.Client, texts: list[str], model: str, tokens: int) -> str:
    lines = []
    for index, prompt in enumerate(texts):
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        lines.append(json.dumps({"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body}))
    given = client.post("/files", data={"purpose": "batch"}, files={"file": ("rows.jsonl", "\n".join(lines).encode())})
    asked = {"input_file_id": given.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    created = client.post("/batches", json=asked)
    created.raise_for_status()
    return str(created.json()["id"])
