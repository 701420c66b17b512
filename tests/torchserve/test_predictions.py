"""TorchServe's inference paths behind a real MLServer: bodies in, chunks out, statuses, headers, errors, clients."""

from __future__ import annotations

import ast
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest

from tests import markdown, plain_http
from tests.server.harness import HOST, Model, Server, serve
from tests.torchserve.predicting import ECHO, MAX_BYTES, SETTINGS, SHIM, TORCHSERVE
from tests.torchserve.workshop import write_handler
from tests.waiting import wait_until

_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def server(predictions_server: Server) -> Server:
    return predictions_server


def _post(server: Server, path: str = "predictions/echo", **options: Any) -> httpx.Response:
    return plain_http.post(f"{server.url}/{path}", timeout=_TIMEOUT_S, **options)


def _got(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def _error(response: httpx.Response) -> tuple[int, str, str]:
    body = response.json()
    assert list(body) == ["code", "type", "message"] and body["code"] == response.status_code
    assert response.headers["content-type"] == "application/json"
    return body["code"], body["type"], body["message"]


@pytest.mark.parametrize(
    ("raw", "content_type", "expected"),
    [
        (b'{"a": 1}', "application/json", ["dict", {"a": 1}]),
        (b"[1]", "Application/JSON; charset=utf-8", ["list", [1]]),
        (b"{", "application/json", ["bytearray", "{"]),
        (b"text", "text/plain", ["str", "text"]),
        (b"\x89PNG\xff", "image/png", ["bytearray", "\x89PNG\xff"]),
        (b'{"a": 1}', None, ["bytearray", '{"a": 1}']),
        (b"", None, ["bytearray", ""]),
        (b"", "text/plain", ["str", ""]),
    ],
)
def test_a_raw_body_reaches_the_handler_by_its_content_type(
    server: Server, raw: bytes, content_type: str | None, expected: list[Any]
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    for send in (plain_http.post, plain_http.put):
        got = _got(send(f"{server.url}/predictions/echo", content=raw, headers=headers, timeout=_TIMEOUT_S))
        assert got["data"] == {"body": expected}
        assert got["kinds"] == {"body": (content_type or "").partition(";")[0].lower()}


def test_a_body_in_chunks_is_one_body(server: Server) -> None:
    assert _got(_post(server, content=iter([b"a", b"b", b"c"])))["data"] == {"body": ["bytearray", "abc"]}


def test_the_fields_of_a_multipart_form_reach_the_handler(server: Server) -> None:
    files = {
        "data": ("k.png", b"\x89PNG\r\n--\xff", "image/png"),
        "json": ("j.json", b'{"a": 1}', "application/json; charset=utf-8"),
        "bare": ("bare", b"{}", ""),
        "field": (None, b"5"),
    }
    got = _got(_post(server, files=files))
    assert got["data"] == {
        "data": ["bytearray", "\x89PNG\r\n--\xff"],
        "json": ["dict", {"a": 1}],
        "bare": ["bytearray", "{}"],
        "field": ["bytearray", "5"],
    }
    assert got["kinds"] == {
        "data": "image/png",
        "json": "application/json",
        "bare": "application/octet-stream",
        "field": "",
    }


def test_the_fields_of_a_url_encoded_form_reach_the_handler(server: Server) -> None:
    got = _got(_post(server, data={"data": "a b&c=ü", "text": "x"}))
    assert got["data"] == {"data": ["bytearray", "a b&c=ü".encode().decode("latin-1")], "text": ["bytearray", "x"]}
    headers = {"content-type": "application/x-www-form-urlencoded"}
    assert _got(_post(server, content=b"a&b=%zz&&", headers=headers))["data"] == {
        "a": ["bytearray", ""],
        "b": ["bytearray", "%zz"],
    }
    assert _got(_post(server, content=b"", headers=headers))["data"] == {}


@pytest.mark.parametrize(
    ("raw", "content_type", "said"),
    [
        (b"x", "multipart/form-data", "content-type: must be multipart/form-data with a boundary"),
        (b"no form", "multipart/form-data; boundary=b", "body: is not valid multipart/form-data"),
        (b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx', "multipart/form-data; boundary=b", "ends before"),
        (b"--b\r\nX: y\r\n\r\nx\r\n--b--\r\n", "multipart/form-data; boundary=b", "a part has no name"),
        (b"a=1&" * 1001, "application/x-www-form-urlencoded", "body: the form has more than 1000 fields"),
    ],
)
def test_a_form_that_is_none_is_a_bad_request(server: Server, raw: bytes, content_type: str, said: str) -> None:
    code, kind, message = _error(_post(server, content=raw, headers={"content-type": content_type}))
    assert (code, kind) == (400, "BadRequestException") and said in message


def test_the_handlers_status_content_type_and_headers_are_those_of_the_reply(server: Server) -> None:
    reply = _post(server, content=b"created")
    assert (reply.status_code, reply.content) == (201, b"\x89PNG")
    assert reply.headers["content-type"] == "image/png" and reply.headers["x-mine"] == "yes"
    assert reply.headers["content-length"] == "4" and "ts_stream_next" not in reply.headers
    assert reply.headers["cache-control"] == "no-cache; no-store, must-revalidate, private"
    plain = _post(server, content=b"")
    assert "content-type" not in plain.headers and "transfer-encoding" not in plain.headers
    empty = _post(server, content=b"nothing")
    assert (empty.status_code, empty.content) == (204, b"") and "content-length" not in empty.headers


def test_an_error_status_of_the_handlers_own_keeps_its_body(server: Server) -> None:
    reply = _post(server, content=b"teapot")
    assert (reply.status_code, reply.text, reply.headers["content-type"]) == (404, "no such pot", "text/plain")


def test_a_header_of_the_handlers_cannot_add_others(server: Server) -> None:
    refused = _post(server, content=b"split")
    reason = "its name is empty, or its name or value has characters that HTTP does not allow"
    message = f"the handler's header 'x-mine' cannot be sent: {reason}"
    assert _error(refused) == (503, "InternalServerException", message)
    assert "set-cookie" not in refused.headers


def test_each_intermediate_response_is_one_chunk_and_the_final_one_is_the_last(server: Server) -> None:
    """The chunks are compared byte by byte, as ``iter_content(chunk_size=None)`` of requests reads them."""
    assert _chunks(server, "predictions/hello", b"x")[1] == [b"hello"] * 3 + [b"hello world "]
    head, chunks = _chunks(server, "predictions/echo", b"pieces")
    assert b"content-type: text/plain" in head and b"content-length" not in head
    assert chunks == [b"one", b"\xff\x00", b'{\n  "three": 3\n}', b"last"]


def test_a_stream_has_torchserves_header_of_its_first_response(server: Server) -> None:
    assert b"\r\nts_stream_next: true\r\n" in _chunks(server, "predictions/echo", b"pieces")[0]
    body = {"id": "v2", "inputs": [{"name": "body", "datatype": "BYTES", "shape": [1], "data": ["pieces"]}]}
    url = f"{server.url}/v2/models/echo/infer_stream"
    with plain_http.stream("POST", url, json=body, timeout=_TIMEOUT_S) as response:
        assert response.status_code == 200 and "ts_stream_next" not in response.headers


def test_the_status_of_a_stream_is_that_of_its_first_response(server: Server) -> None:
    """As in TorchServe, all later statuses are lost, even that of an error in the last response."""
    head, chunks = _chunks(server, "predictions/echo", b"206 at first", 206)
    assert chunks == [b"piece 0", b"piece 1", b"the end"] and b"ts_stream_next: true" in head
    assert _chunks(server, "predictions/echo", b"503 at last")[1] == [b"piece 0", b"piece 1", b"the end"]


def test_a_stream_whose_status_allows_no_body_has_none_and_the_connection_stays(server: Server) -> None:
    with httpx.Client(trust_env=False, timeout=_TIMEOUT_S) as client:
        url = f"{server.url}/predictions/echo"
        empty = client.post(url, content=b"204 at first")
        assert (empty.status_code, empty.content) == (204, b"") and "transfer-encoding" not in empty.headers
        assert client.post(url, content=b"created").status_code == 201


@pytest.mark.parametrize(
    ("code", "status"), [(429, 429), (404, 404), (507, 507), (206, 503), (302, 503), (0, 503), (999, 503)]
)
def test_another_code_than_200_ends_the_request_with_its_message(server: Server, code: int, status: int) -> None:
    """A code that is not that of an error counts as 503."""
    assert _error(_post(server, content=b"code %d" % code)) == (status, "InternalServerException", "enough")


def test_what_a_handler_sends_after_a_code_is_dropped_and_the_next_request_is_answered(server: Server) -> None:
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
        _post(server, content=b"late code")
    assert _post(server, content=b"created").status_code == 201


def _chunks(server: Server, path: str, body: bytes, status: int = 200) -> tuple[bytes, list[bytes]]:
    """Returns the head of the reply in lower case, and its chunks up to the empty one."""
    with socket.create_connection((HOST, server.http_port), timeout=_TIMEOUT_S) as connection:
        connection.sendall(b"POST /%b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)))
        connection.sendall(body)
        reader = connection.makefile("rb")
        head = b"".join(iter(reader.readline, b"\r\n")).lower()
        assert head.startswith(b"http/1.1 %d" % status) and b"transfer-encoding: chunked" in head
        chunks = []
        while size := int(reader.readline(), 16):
            chunks.append(reader.read(size))
            assert reader.read(2) == b"\r\n"
        return head, chunks


def test_requests_reads_the_pieces_that_the_handler_sent(server: Server) -> None:
    """TorchServe's own examples read them in this way."""
    script = (
        "import requests\n"
        f"reply = requests.post('{server.url}/predictions/echo', data=b'pieces', stream=True, timeout={_TIMEOUT_S})\n"
        "print([piece for piece in reply.iter_content(chunk_size=None) if piece])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=_TIMEOUT_S, check=True)
    assert ast.literal_eval(done.stdout.decode()) == [b"one", b"\xff\x00", b'{\n  "three": 3\n}', b"last"]


def test_a_client_reads_each_piece_when_it_is_sent(server: Server) -> None:
    url = f"{server.url}/predictions/echo"
    with plain_http.stream("POST", url, content=b"endless", timeout=_TIMEOUT_S) as response:
        assert response.headers["transfer-encoding"] == "chunked"
        assert next(response.iter_raw()).startswith(b"piece")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("raise", (503, "InternalServerException", "the handler raised ValueError: as asked")),
        ("exception", (404, "InternalServerException", "no such thing")),
        ("memory", (507, "InternalServerException", "the handler raised MemoryError")),
    ],
)
def test_an_error_before_the_first_chunk_has_its_status(
    server: Server, text: str, expected: tuple[int, str, str]
) -> None:
    assert _error(_post(server, content=text.encode())) == expected


def test_an_error_after_the_first_chunk_breaks_the_stream_off(server: Server) -> None:
    received = b""
    with (
        pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"),
        plain_http.stream("POST", f"{server.url}/predictions/echo", content=b"late", timeout=_TIMEOUT_S) as response,
    ):
        for chunk in response.iter_raw():
            received += chunk
    assert received == b"first"
    reason = "A stream of model 'echo' breaks off: the handler raised ValueError: after the first piece"
    wait_until(lambda: reason in server.log, "the reason")
    assert "ASGI callable returned without completing response" not in server.log
    assert _post(server, content=b"").status_code == 200


def test_what_is_not_there_is_named_as_torchserve_names_it(server: Server) -> None:
    unknown = (404, "ModelNotFoundException", "Model not found: nobody")
    for path in ("predictions/nobody", "predictions/nobody/1.0", "explanations/nobody", "v1/models/nobody:predict"):
        assert _error(_post(server, path, content=b"x")) == unknown
    assert _got_text(_post(server, "predictions/hello/1.0", content=b"x")) == "hellohellohellohello world "
    assert _error(_post(server, "predictions/hello/2.0", content=b"x")) == (
        404,
        "ModelVersionNotFoundException",
        "Model version: 2.0 does not exist for model: hello",
    )
    refused = plain_http.get(f"{server.url}/predictions/hello", timeout=_TIMEOUT_S)
    assert _error(refused)[:2] == (405, "MethodNotAllowedException")
    assert refused.text == (
        '{\n  "code": 405,\n  "type": "MethodNotAllowedException",\n'
        '  "message": "Requested method is not allowed, use POST or PUT."\n}\n'
    )


def _got_text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.text


def test_a_model_that_generates_tokens_is_refused_with_its_own_paths(server: Server) -> None:
    code, kind, message = _error(_post(server, "predictions/tokens", json={"text_input": "x"}))
    assert (code, kind) == (400, "BadRequestException")
    assert message.startswith("model: tokens generates tokens") and "/v2/models/tokens/generate" in message


def test_a_body_over_the_bound_is_413(server: Server) -> None:
    assert _got(_post(server, content=b"x" * MAX_BYTES))["id"]
    large = b"x" * (MAX_BYTES + 1)
    for body in (large, iter([large])):
        assert _error(_post(server, content=body))[:2] == (413, "TooLongFrameException")


@pytest.mark.parametrize("text", ["", "raise", "pieces"])
def test_every_reply_has_the_id_of_its_request(server: Server, text: str) -> None:
    made = _post(server, content=text.encode()).headers["x-request-id"]
    assert str(UUID(made)) == made
    own = _post(server, content=text.encode(), headers={"x-request-id": "mine-1"})
    assert own.headers["x-request-id"] == "mine-1"
    prefixed = _post(server, content=text.encode(), headers={"x-request-id-prefix": "team"}).headers["x-request-id"]
    assert re.fullmatch(r"team:[0-9a-f-]{36}", prefixed)


def test_the_handler_sees_the_id_and_the_headers_of_its_request(server: Server) -> None:
    headers = {"x-request-id": "mine-2", "X-Own": "yes", "ts_request_sequence_id": "s-1"}
    got = _got(_post(server, content=b"", headers=headers))
    assert got["id"] == "mine-2"
    assert got["headers"] == {
        "explain": "False",
        "url_path": "",
        "x-own": "yes",
        "X-Own": "yes",
        "ts_request_sequence_id": "s-1",
    }


def test_explanations_and_kserves_v1_paths_lead_to_the_handler(server: Server) -> None:
    body = {"instances": [1, 2]}
    for path, explain in (
        ("predictions/echo", "False"),
        ("explanations/echo", "True"),
        ("v1/models/echo:predict", "False"),
        ("v1/models/echo:explain", "True"),
    ):
        got = _got(_post(server, path, json=body))
        assert (got["data"], got["headers"]["explain"]) == ({"body": ["dict", body]}, explain)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_its_worker(server: Server, streamed: bool) -> None:
    """The handler would never end, and the model has only one worker."""
    url = f"{server.url}/predictions/echo"
    if streamed:
        with plain_http.stream("POST", url, content=b"endless", timeout=_TIMEOUT_S) as response:
            next(response.iter_raw())
    else:
        with socket.create_connection((HOST, server.http_port), timeout=_TIMEOUT_S) as connection:
            connection.sendall(b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\n\r\nendless")
    assert _post(server, content=b"").status_code == 200


@pytest.mark.long
def test_a_client_that_reads_nothing_is_cut_off_and_frees_its_worker(server: Server) -> None:
    with socket.create_connection((HOST, server.http_port), timeout=_TIMEOUT_S) as connection:
        connection.sendall(b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nflood")
        assert connection.recv(12) == b"HTTP/1.1 200"
        assert _post(server, content=b"").status_code == 200
    wait_until(lambda: "A client of model 'echo' has read nothing for 2 s: its stream is closed" in server.log)


@pytest.mark.slow
def test_at_sigterm_a_stream_in_flight_breaks_off_and_new_requests_are_refused(tmp_path: Path) -> None:
    models = [Model("echo", write_handler(tmp_path / "echo", ECHO), implementation=TORCHSERVE, extra=SHIM)]
    environment = {"MLSERVER_TORCH_STREAM_DRAIN_GRACE": "600"}
    with serve(tmp_path / "models", models, settings=SETTINGS, environment=environment) as running:
        url = f"{running.url}/predictions/echo"
        with (
            pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"),
            plain_http.stream("POST", url, content=b"endless", timeout=_TIMEOUT_S) as response,
        ):
            chunks = response.iter_raw()
            next(chunks)
            running.process.terminate()
            wait_until(lambda: _ping(running) == (503, "Unhealthy"))
            refused = _post(running, content=b"")
            assert _error(refused)[:2] == (503, "ServiceUnavailableException") and refused.headers["retry-after"] == "1"
            running.process.terminate()  # the second signal ends the grace
            for _ in chunks:
                pass
        assert running.process.wait(30) == 0
        assert "A stream of model 'echo' breaks off: the server is shutting down" in running.log


def test_ping_says_that_all_models_are_healthy(server: Server) -> None:
    answer = plain_http.get(f"{server.url}/ping", timeout=_TIMEOUT_S)
    assert (answer.status_code, answer.text) == (200, '{\n  "status": "Healthy"\n}\n')
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]


def test_the_commands_of_the_page_reach_the_handler(server: Server, tmp_path: Path) -> None:
    (block,) = [each for each in markdown.blocks("docs/torchserve.md") if "/predictions/assistant" in each.code]
    commands = block.code.replace("127.0.0.1:8080", f"{HOST}:{server.http_port}").replace("curl ", "curl -sS --fail ")
    done = subprocess.run(["bash", "-euc", commands], cwd=tmp_path, capture_output=True, timeout=_TIMEOUT_S, check=True)
    decoder, rest, answers = json.JSONDecoder(), done.stdout.decode(), []
    while rest := rest.strip():
        answer, end = decoder.raw_decode(rest)
        answers.append(answer.get("data", answer))
        rest = rest[end:]
    assert answers == [
        {"data": ["bytearray", "hello"]},
        {"data": ["str", "hello\n"], "size": ["bytearray", "224"]},
        {"body": ["dict", {"prompt": "hello"}]},
        {"body": ["bytearray", "hello\n"]},
        {"body": ["str", "hello"]},
        {"name": "assistant", "ready": True},
        {"body": ["dict", {"instances": [1]}]},
        answers[7],
        {"size": ["bytearray", "224"], "body": ["str", "hello"]},
        {"body": ["str", "hello"]},
        {"status": "Healthy"},
    ]
    assert answers[7]["info"]["title"] == "RESTful API for: assistant"


# "die" ends the worker, and no later one comes up.
_DIES = """
import os

def handle(data, context):
    if data is None:
        if os.path.exists(MARK):
            raise ValueError("will not start")
        return None
    if data[0]["body"] == b"die":
        open(MARK, "w").close()
        os._exit(9)
    return ["fine"]
"""


@pytest.mark.long
def test_ping_says_which_part_of_the_models_is_healthy(tmp_path: Path) -> None:
    models = []
    for name in ("one", "two"):
        source = f"MARK = {str(tmp_path / name / 'mark')!r}\n{_DIES}"
        models.append(Model(name, write_handler(tmp_path / name, source), implementation=TORCHSERVE, extra=SHIM))
    with serve(tmp_path / "models", models, settings=SETTINGS) as running:
        for name, expected in (("one", (200, "Partial Healthy")), ("two", (503, "Unhealthy"))):
            assert _post(running, f"predictions/{name}", content=b"x").text == "fine"
            code, kind, message = _error(_post(running, f"predictions/{name}", content=b"die"))
            assert (code, kind) == (503, "InternalServerException") and "exited with status 9" in message
            wait_until(lambda expected=expected: _ping(running) == expected)
        code, kind, message = _error(_post(running, "predictions/two", content=b"x"))
        assert (code, kind) == (503, "ServiceUnavailableException") and "will not start" in message


def _ping(server: Server) -> tuple[int, str]:
    answer = plain_http.get(f"{server.url}/ping", timeout=_TIMEOUT_S)
    return answer.status_code, answer.json()["status"]
