"""Runs a batch with the openai SDK as a user would write it, in an environment that has the SDK.

Prints one JSON object. Imports nothing of this package.
"""

from __future__ import annotations

import io
import json
import sys
import time

import openai


def submit(client: openai.OpenAI, rows: int) -> dict[str, object]:
    lines = [
        {
            "custom_id": f"row-{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"row {n}"}],
                "max_tokens": 6,
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        for n in range(rows)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("rows.jsonl", io.BytesIO(content)), purpose="batch")
    assert client.files.retrieve(file.id).bytes == len(content)
    assert client.files.wait_for_processing(file.id).status == "processed"
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"from": "the sdk"}
    )
    assert batch.status == "validating" and batch.metadata == {"from": "the sdk"}
    assert batch.id in [each.id for each in client.batches.list(limit=2)]
    return {"batch": batch.id, "file": file.id}


def collect(client: openai.OpenAI, batch_id: str) -> dict[str, object]:
    while (batch := client.batches.retrieve(batch_id)).status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.2)
    lines = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    answers = [openai.types.chat.ChatCompletion.model_validate(line["response"]["body"]) for line in lines]
    assert all(answer.choices[0].finish_reason == "length" for answer in answers)
    return {
        "status": batch.status,
        "counts": batch.request_counts.to_dict(),
        "ids": [line["custom_id"] for line in lines],
        "answers": [answer.choices[0].message.content for answer in answers],
    }


def errors(client: openai.OpenAI, batch_id: str) -> dict[str, object]:
    found = {}
    for name, call in (
        ("file", lambda: client.files.retrieve("file-1")),
        ("batch", lambda: client.batches.retrieve("batch_1")),
        (
            "window",
            lambda: client.batches.create(input_file_id="x", endpoint="/v1/completions", completion_window="1h"),
        ),
        ("purpose", lambda: client.files.create(file=("a", b"{}"), purpose="vision")),
        ("size", lambda: client.files.create(file=("a", b"x" * 10_000_000), purpose="batch")),
        ("cancel", lambda: client.batches.cancel(batch_id)),
    ):
        try:
            call()
        except openai.APIStatusError as error:
            found[name] = [type(error).__name__, error.status_code, error.body.get("param")]
    return found


if __name__ == "__main__":
    task, url, value = sys.argv[1:]
    asking = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60)
    tasks = {"submit": lambda: submit(asking, int(value)), "collect": lambda: collect(asking, value)}
    print(json.dumps(tasks[task]() if task in tasks else errors(asking, value)))
