"""The recipe of a batch from a bucket: its commands run one after the other, with a bucket and a model server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from asyncio import run
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.cloud.store import Store
from tests import markdown, plain_http
from tests.cloud.models import ModelServer

_PAGE = "docs/recipes/batch-from-a-bucket.md"


async def _lines(url: str) -> list[dict[str, Any]]:
    """Returns the rows of all parts below a URL, in order."""
    store = Store.open(url)
    keys = sorted([info.key async for info in store.list() if info.key.startswith("part-")])
    return [json.loads(line) for key in keys for line in (await store.get(key)).splitlines()]


@pytest.mark.long
def test_the_commands_of_the_recipe_answer_the_prompts_of_a_bucket_in_their_order(
    bucket: str, aws: dict[str, str], server: ModelServer, tmp_path: Path
) -> None:
    (code,) = [each.code for each in markdown.blocks(_PAGE) if "s3://" in each.code]
    prompts = [{"prompt": f"row {number}"} for number in range(5)]
    body = "\n".join(json.dumps(each) for each in prompts)
    plain_http.put(f"{aws['AWS_ENDPOINT_URL']}/{bucket}/prompts/a.jsonl", content=body.encode()).raise_for_status()
    code = code.replace("s3://bucket", f"s3://{bucket}").replace("http://127.0.0.1:8080", server.url)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", code],
        cwd=tmp_path,
        env={**os.environ, "PATH": programs},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = run(_lines(f"s3://{bucket}/answers"))
    assert [line["response"]["status_code"] for line in lines] == [200] * len(prompts)
    assert sorted(server.asked) == [each["prompt"] for each in prompts]  # no row was inferred twice
    assert [line["index"] for line in lines] == list(range(len(prompts)))
