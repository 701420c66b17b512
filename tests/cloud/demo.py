"""``make cloud-demo``: the embedded model answers 200 prompts from a bucket, and the answers are in order.

Uses the command and moto; everything runs on this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import httpx

from mlserver_torch_stream.cloud.store import Store, settle
from tests.cloud.moto import moto

_COUNT = 200
_SUBJECTS = (
    "The river",
    "A comet",
    "Our garden",
    "The old castle",
    "Every winter",
    "The pilot",
    "A letter",
    "The market",
)


def main() -> int:
    with moto() as environment:
        os.environ.update(environment)
        httpx.put(f"{environment['AWS_ENDPOINT_URL']}/demo").raise_for_status()
        asyncio.run(_upload())
        run = ["run", "--input", "s3://demo/prompts", "--output", "s3://demo/answers", "--progress", "on"]
        command = [sys.executable, "-m", "mlserver_torch_stream.cli", "cloud", *run]
        status = subprocess.run([*command, "--parameters", '{"max_tokens": 16}']).returncode
        asyncio.run(_show())
    return status


async def _upload() -> None:
    store = Store.open("s3://demo/prompts")
    prompts = [f"{_SUBJECTS[i % len(_SUBJECTS)]} number {i} is" for i in range(_COUNT)]
    await asyncio.gather(*(store.put(f"{i:03}.txt", prompt.encode()) for i, prompt in enumerate(prompts)))
    await settle()


async def _show() -> None:
    store = Store.open("s3://demo/answers")
    parts = sorted([info.key async for info in store.list() if info.key.startswith("part-")])
    for part in parts:
        for line in (await store.get(part)).splitlines():
            row = json.loads(line)
            body = (row["response"] or {"body": row})["body"]
            answer = body.get("error") or body["choices"][0]["text"]
            print(f"{row['index']:3} {row['key']}  {answer!r}")
    await settle()


if __name__ == "__main__":
    sys.exit(main())
