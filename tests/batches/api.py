"""What these tests ask of a server: files, batches, and rows in OpenAI's format.

Does not know how the server is started.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

WAIT_S = 120.0
JsonObject = dict[str, Any]


def row(number: int, **body: Any) -> JsonObject:
    """A row with a chat of one message; ``body`` adds fields to its request or replaces them."""
    said = [{"role": "user", "content": f"row {number}"}]
    request = {"model": "tiny", "messages": said, "max_tokens": 4, "temperature": 0, **body}
    return {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": request}


def encoded(rows: Sequence[JsonObject | str]) -> bytes:
    return "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in rows).encode()


class Api:
    """Calls one server's files and batches, below the paths' ``prefix``."""

    def __init__(self, url: str, prefix: str = "/v1") -> None:
        self.client = httpx.Client(verify=False, base_url=f"{url}{prefix}", timeout=60)

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *exception: object) -> None:
        self.client.close()

    def post_file(self, content: bytes, purpose: str = "batch", name: str = "rows.jsonl") -> httpx.Response:
        return self.client.post("/files", files={"file": (name, content)}, data={"purpose": purpose})

    def upload(self, rows: Sequence[JsonObject | str]) -> JsonObject:
        answer = self.post_file(encoded(rows))
        assert answer.status_code == 200, answer.text
        file: JsonObject = answer.json()
        return file

    def post_batch(self, **body: Any) -> httpx.Response:
        asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **body}
        return self.client.post("/batches", json=asked)

    def create(self, rows: Sequence[JsonObject | str], **body: Any) -> JsonObject:
        answer = self.post_batch(input_file_id=self.upload(rows)["id"], **body)
        assert answer.status_code == 200, answer.text
        batch: JsonObject = answer.json()
        return batch

    def batch(self, batch_id: str) -> JsonObject:
        answer = self.client.get(f"/batches/{batch_id}")
        assert answer.status_code == 200, answer.text
        found: JsonObject = answer.json()
        return found

    def cancel(self, batch_id: str) -> httpx.Response:
        return self.client.post(f"/batches/{batch_id}/cancel")

    def wait(self, batch_id: str, *statuses: str, done: int = 0) -> JsonObject:
        """Waits until the batch has one of the statuses, and at least ``done`` rows are done. Returns the batch.

        Without statuses, waits until the batch has ended.
        """
        end = time.monotonic() + WAIT_S
        while True:
            found = self.batch(batch_id)
            counts = found["request_counts"]
            wanted = statuses or ("completed", "failed", "cancelled", "expired")
            if found["status"] in wanted and counts["completed"] + counts["failed"] >= done:
                return found
            assert time.monotonic() < end, f"not within {WAIT_S:.0f} s: {found}"
            time.sleep(0.05)

    def lines(self, file_id: str | None) -> list[JsonObject]:
        """Returns the rows of a file."""
        assert file_id is not None
        answer = self.client.get(f"/files/{file_id}/content")
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines()]


def error(answer: httpx.Response) -> tuple[int, str | None, str]:
    """Returns status, field and message of OpenAI's error object."""
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}, found
    return answer.status_code, found["param"], found["message"]
