"""Files: what is stored and shown of them, and all reasons for refusing one."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.batches.api import Api, encoded, error, row
from tests.batches.conftest import MAX_BYTES
from tests.server.harness import HOST, Server
from tests.waiting import wait_until

_TEN_GB = 10 * 10**9
_NO_ID = "file-" + "0" * 32


def test_a_file_is_kept_shown_listed_and_deleted(api: Api, store: Path) -> None:
    content = encoded([row(1), row(2)])
    file = api.post_file(content, name="Fragen über 1.jsonl").json()
    assert file["object"] == "file" and file["bytes"] == len(content) and file["purpose"] == "batch"
    assert file["filename"] == "Fragen über 1.jsonl" and file["status"] == "processed"
    assert api.client.get(f"/files/{file['id']}").json() == file
    assert api.client.get(f"/files/{file['id']}/content").content == content
    assert file in api.client.get("/files", params={"purpose": "batch"}).json()["data"]
    assert file not in api.client.get("/files", params={"purpose": "batch_output"}).json()["data"]
    gone = api.client.delete(f"/files/{file['id']}")
    assert gone.json() == {"id": file["id"], "object": "file", "deleted": True}
    assert error(api.client.get(f"/files/{file['id']}"))[0] == 404
    assert error(api.client.get(f"/files/{file['id']}/content"))[0] == 404
    assert error(api.client.delete(f"/files/{file['id']}"))[0] == 404
    assert not [path for path in store.rglob("*") if file["id"] in path.name]


def test_a_file_of_the_largest_size_comes_back_unchanged(api: Api) -> None:
    content = bytes(range(256)) * (MAX_BYTES // 256) + b"\r\n--x\r\n-"
    content = content[:MAX_BYTES]
    file = api.post_file(content).json()
    assert api.client.get(f"/files/{file['id']}/content").content == content
    api.client.delete(f"/files/{file['id']}")


@pytest.mark.long
def test_a_client_that_reads_nothing_of_a_file_is_cut_off(api: Api, batch_server: Server) -> None:
    file = api.post_file(b"x" * MAX_BYTES).json()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect((HOST, batch_server.http_port))
        connection.sendall(b"GET /v1/files/%b/content HTTP/1.1\r\nHost: x\r\n\r\n" % file["id"].encode())
        assert connection.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: "A client has read nothing of a file for 3 s: its download is closed" in batch_server.log)
    assert "Exception in ASGI application" not in batch_server.log
    api.client.delete(f"/files/{file['id']}")


def test_files_are_listed_in_both_orders_in_pages(api: Api) -> None:
    made = [api.upload([row(n)])["id"] for n in range(3)]
    newest = api.client.get("/files", params={"limit": 2}).json()
    assert [each["id"] for each in newest["data"]] == made[:0:-1] and newest["has_more"] is True
    later = api.client.get("/files", params={"order": "asc", "after": made[0]}).json()
    assert [each["id"] for each in later["data"]] == made[1:] and later["has_more"] is False
    for each in made:
        api.client.delete(f"/files/{each}")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "ten"}, "limit"),
        ({"limit": "1" * 400}, "limit"),
        ({"after": "../../etc"}, "after"),
        ({"order": "up"}, "order"),
        ({"limits": "1"}, "limits"),
        ({"": "1"}, '""'),
    ],
)
def test_a_bad_parameter_of_a_list_is_named(api: Api, query: dict[str, str], param: str) -> None:
    assert error(api.client.get("/files", params=query))[:2] == (400, param)


@pytest.mark.parametrize(
    "name", ["file-1", _NO_ID, "..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "file-" + "0" * 31 + "G", "%00", "x" * 3000]
)
def test_an_id_that_no_file_has_is_404_and_leaves_the_store_alone(api: Api, name: str) -> None:
    for method, path in (("GET", "/files/{}"), ("DELETE", "/files/{}"), ("GET", "/files/{}/content")):
        assert api.client.request(method, path.format(name)).status_code == 404
    for method, path in (("GET", "/batches/{}"), ("POST", "/batches/{}/cancel")):
        assert api.client.request(method, path.format(name.replace("file-", "batch_"))).status_code == 404


def _form(*parts: bytes, end: bytes = b"--x--\r\n") -> bytes:
    return b"".join(b"--x\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts) + end


_PURPOSE = b'name="purpose"\r\n\r\nbatch'
_FILE = b'name="file"; filename="a.jsonl"\r\n\r\n{}'
_FORM = "multipart/form-data; boundary=x"


@pytest.mark.parametrize(
    ("body", "param", "content_type"),
    [
        (b"", "body", _FORM),
        (b"{}", "body", _FORM),
        (b"{}", "content-type", "application/json"),
        (b"{}", "content-type", "multipart/form-data"),
        (b"{}", "content-type", f"multipart/form-data; boundary={'x' * 3000}"),
        (_form(_FILE), "purpose", _FORM),
        (_form(_PURPOSE), "file", _FORM),
        (_form(_PURPOSE, _FILE, end=b""), "body", _FORM),
        (_form(b'name="purpose"\r\n\r\nassistants', _FILE), "purpose", _FORM),
        (_form(_FILE, b'name="purpose"\r\n\r\n' + b"x" * 5000), "purpose", _FORM),
        (_form(_PURPOSE, _PURPOSE, _FILE), "purpose", _FORM),
        (_form(_PURPOSE, _FILE, _FILE), "file", _FORM),
        (_form(_PURPOSE, b'name="file"\r\n\r\n{}'), "file", _FORM),
        (_form(_PURPOSE, b'name="file"; filename="a"\r\n\r\n'), "file", _FORM),
        (_form(_PURPOSE, b'name="file"; filename="' + b"a" * 300 + b'"\r\n\r\n{}'), "file", _FORM),
        (_form(_PURPOSE, b'name="expires_after[seconds]"\r\n\r\n60', _FILE), "expires_after", _FORM),
        (_form(_PURPOSE, b'name=""\r\n\r\n{}', _FILE), '""', _FORM),
        (_form(_PURPOSE, b'name="files"\r\n\r\n{}', _FILE), "files", _FORM),
        (_form(b'filename="a"\r\n\r\n{}'), "body", _FORM),
        (_form(b'name="a"\r\nX: ' + b"x" * 20_000 + b"\r\n\r\n{}"), "body", _FORM),
    ],
)
def test_a_bad_form_is_400_and_names_the_field(
    api: Api, store: Path, body: bytes, param: str, content_type: str
) -> None:
    before = sorted(store.rglob("*"))
    answer = api.client.post("/files", content=body, headers={"content-type": content_type})
    assert error(answer)[:2] == (400, param)
    assert sorted(store.rglob("*")) == before


def test_a_packed_form_is_refused_by_name(api: Api) -> None:
    headers = {"content-type": _FORM, "content-encoding": "gzip"}
    status, _, message = error(api.client.post("/files", content=b"", headers=headers))
    assert status == 415 and "gzip" in message


def test_ten_gigabytes_that_are_announced_are_refused_before_they_come(batch_server: Server) -> None:
    head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: {_FORM}\r\nContent-Length: {_TEN_GB}\r\n\r\n"
    with socket.create_connection((HOST, batch_server.http_port), timeout=20) as connection:
        connection.sendall(head.encode())
        answer = _until_closed(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ") and b"connection: close" in head.lower()
    assert str(MAX_BYTES) in json.loads(body)["error"]["message"]


def _until_closed(connection: socket.socket) -> bytes:
    answer = b""
    while piece := connection.recv(65536):
        answer += piece
    return answer


def test_a_file_without_an_end_is_refused_at_the_bound_and_its_rest_is_not_read(api: Api, store: Path) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        yield b"--x\r\nContent-Disposition: form-data; " + _PURPOSE + b"\r\n"
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        while sent < _TEN_GB:
            sent += 65536
            yield b"x" * 65536

    before = sorted(store.rglob("*"))
    answer = api.client.post("/files", content=endless(), headers={"content-type": _FORM})
    assert answer.status_code == 413
    assert sent < 100 * 2**20  # what the two sides of a connection hold, and no more
    assert sorted(store.rglob("*")) == before


def test_a_client_that_leaves_in_the_middle_of_a_file_leaves_nothing(
    api: Api, store: Path, batch_server: Server
) -> None:
    before = sorted(store.rglob("*"))
    head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: {_FORM}\r\nContent-Length: 100000\r\n\r\n"
    with socket.create_connection((HOST, batch_server.http_port), timeout=20) as connection:
        connection.sendall(head.encode() + _form(_PURPOSE, _FILE, end=b""))
    assert api.client.get("/files", params={"limit": 1}).status_code == 200
    assert sorted(store.rglob("*")) == before


@pytest.mark.slow
def test_files_of_which_nothing_comes_any_more_give_their_places_to_others(
    api: Api, store: Path, batch_server: Server
) -> None:
    before = sorted(store.rglob("*"))
    head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: {_FORM}\r\nContent-Length: 100000\r\n\r\n"
    with ExitStack() as stack:
        dead = [stack.enter_context(socket.create_connection((HOST, batch_server.http_port), 30)) for _ in range(8)]
        for connection in dead:
            connection.sendall(head.encode() + _form(_PURPOSE, _FILE, end=b""))
        answers = [_until_closed(connection) for connection in dead]
    assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers), answers
    assert sorted(store.rglob("*")) == before
    api.upload([row(1)])


def test_the_input_of_a_batch_that_runs_is_not_deleted(api: Api) -> None:
    batch = api.create([row(n, max_tokens=100, ignore_eos=True) for n in range(8)])
    status, param, message = error(api.client.delete(f"/files/{batch['input_file_id']}"))
    assert (status, param) == (400, "file_id") and batch["id"] in message
    api.cancel(batch["id"])
    api.wait(batch["id"])
    assert api.client.delete(f"/files/{batch['input_file_id']}").status_code == 200


_GOOD = {"input_file_id": _NO_ID, "endpoint": "/v1/completions", "completion_window": "24h"}


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"input_file_id": "../x"}, "input_file_id"),
        ({"input_file_id": ["a"]}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"endpoint": {}}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"metadata": {str(n): "b" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
        ({"windows": 1}, "windows"),
    ],
)
def test_a_bad_field_of_a_batch_is_400_and_named(api: Api, changed: dict[str, Any], param: str) -> None:
    assert error(api.client.post("/batches", json={**_GOOD, **changed}))[:2] == (400, param)


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_400(api: Api, body: bytes) -> None:
    assert error(api.client.post("/batches", content=body))[:2] == (400, "body")


def test_a_file_that_a_batch_wrote_is_no_input(api: Api) -> None:
    ended = api.wait(api.create([row(1)])["id"])
    assert error(api.post_batch(input_file_id=ended["output_file_id"]))[:2] == (400, "input_file_id")


def test_a_method_that_a_path_does_not_have_is_405(api: Api) -> None:
    answer = api.client.put("/files")
    assert answer.status_code == 405 and {"GET", "POST"} <= set(answer.headers["allow"].split(", "))
    assert api.client.head("/files").status_code == 200


def test_the_head_of_a_content_reads_nothing_of_it(api: Api, store: Path) -> None:
    """The file is 100 GiB long here, so that reading it would take a minute."""
    file = api.upload([row(0)])
    (content,) = store.rglob(f"{file['id']}.jsonl")
    os.truncate(content, 100 * 2**30)
    try:
        answer = api.client.head(f"/files/{file['id']}/content", timeout=20)
    finally:
        content.unlink()
    assert answer.status_code == 200 and answer.content == b""
    assert answer.headers["content-length"] == str(file["bytes"])
    assert answer.headers["content-type"] == "application/octet-stream"
    assert api.client.head("/files/file-0/content").status_code == 404
