"""Handlers for objects, as a TorchServe user writes them, and their answers."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import yaml

# Counts the bytes of each chunk. "fail" raises, "pieces" streams, and a MiB takes a moment.
COUNT = """
import json, time, zlib
from ts.handler_utils.utils import send_intermediate_predict_response as send

NAMES = ("x-object-key", "x-object-size", "x-chunk-index", "x-chunk-offset", "x-chunk-last")

def handle(data, context):
    if data is None:
        return None
    found, pieces = [], False
    for index, row in enumerate(data):
        body = row.get("data") or row.get("body")
        body = json.dumps(body).encode() if isinstance(body, dict) else body
        body = body.encode() if isinstance(body, str) else bytes(body)
        if body.startswith(b"fail"):
            raise ValueError("as asked")
        said = [context.get_request_header(index, name) for name in NAMES]
        kind = (context.get_request_header(index, "body") or {}).get("content-type")
        found.append({"bytes": len(body), "crc": zlib.crc32(body), "said": said, "kind": kind, "batch": len(data)})
        pieces |= body.startswith(b"pieces")
        if len(body) > 1000000:
            time.sleep(0.05)
    if pieces:
        for number in range(2):
            send([f"piece {number} "] * len(data), context.request_ids, "ok", 200, context)
    return found
"""


def write(folder: Path, source: str = COUNT, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "handler.py"
    path.write_text(source)
    if config:
        (folder / "model-config.yaml").write_text(yaml.safe_dump(config))
    return path


def rows(lines: str | bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines()]


def predictions(row: dict[str, Any]) -> list[Any]:
    found: list[Any] = row["response"]["body"]["predictions"]
    return found


def counted(key: str, body: bytes, chunk: int | None = None) -> list[tuple[Any, ...]]:
    """Returns what ``COUNT`` answers for an object: each chunk's size, checksum, and headers."""
    size = chunk or len(body) or 1
    starts = list(range(0, len(body), size)) or [0]
    return [
        (
            len(body[start : start + size]),
            zlib.crc32(body[start : start + size]),
            [key, str(len(body)), str(number), str(start), "true" if start == starts[-1] else "false"],
        )
        for number, start in enumerate(starts)
    ]


def told(found: list[Any]) -> list[tuple[Any, ...]]:
    return [(each["bytes"], each["crc"], each["said"]) for each in found]
