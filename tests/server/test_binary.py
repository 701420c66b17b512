"""The binary tensor data extension over REST, byte by byte and with Triton's own client."""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
import sys
from typing import Any

import httpx
import pytest

from tests import plain_http
from tests.server import raw, v2
from tests.server.harness import Server

_INFER = "/v2/models/tiny/infer"
_LENGTH = "inference-header-content-length"
_IDS = [5, 6, 7, 8]


def _post(server: Server, body: dict[str, Any], raw: bytes = b"", path: str = _INFER, **headers: str) -> httpx.Response:
    spelled = json.dumps(body).encode()
    content = spelled + raw
    if headers.get("content-encoding") == "gzip":
        content = gzip.compress(content)
    return plain_http.post(
        f"{server.url}{path}",
        content=content,
        headers={_LENGTH: str(len(spelled)), **headers},
        timeout=v2.TIMEOUT_S,
    )


def _bytes(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<I", len(encoded)) + encoded


def _binary(name: str, datatype: str, shape: list[int], raw: bytes) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(raw)}}


def _request(*tensors: tuple[str, str, list[int], bytes], **rest: Any) -> tuple[dict[str, Any], bytes]:
    return {"inputs": [_binary(*tensor) for tensor in tensors], **rest}, b"".join(tensor[3] for tensor in tensors)


def _text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return v2.rest_reply(response.json()).text


@pytest.mark.parametrize("headers", [{}, {"content-encoding": "gzip"}])
@pytest.mark.parametrize("path", [_INFER, "/v2/models/tiny/generate", "/v2/models/tiny/versions/v1/infer"])
def test_tensors_of_raw_bytes_are_those_of_json(server: Server, path: str, headers: dict[str, str]) -> None:
    options = {"max_tokens": 6, "temperature": 0.5, "seed": 3, "ignore_eos": True}
    plain = v2.rest_unary(server.url, _INFER, v2.rest_body("Grüße 🙂", **options))
    body, raw = _request(
        ("text_input", "BYTES", [1], _bytes("Grüße 🙂")),
        ("max_tokens", "INT32", [1], struct.pack("<i", 6)),
        ("temperature", "FP32", [1], struct.pack("<f", 0.5)),
        ("seed", "INT64", [1, 1], struct.pack("<q", 3)),
        ("return_num_input_tokens", "BOOL", [1], b"\0"),
        parameters={"ignore_eos": True},
    )
    body["inputs"].insert(1, v2.bytes_tensor("stop_words", "\x01"))  # one of JSON among them
    reply = _post(server, body, raw, path, **headers)
    assert _text(reply) == plain.text
    assert "num_input_tokens" not in v2.rest_reply(reply.json()).outputs


def test_token_ids_and_streams_take_them_too(server: Server) -> None:
    ids = {"name": "input_ids", "datatype": "INT64", "shape": [4], "data": _IDS}
    plain = v2.rest_unary(server.url, _INFER, v2.rest_body(inputs=[ids], max_tokens=6))
    for datatype, spelling in (("INT64", "<4q"), ("INT32", "<4i")):
        packed = struct.pack(spelling, *_IDS)
        body, raw = _request(("input_ids", datatype, [1, 4], packed), parameters={"max_tokens": 6})
        assert _text(_post(server, body, raw)) == plain.text
        stream = _post(server, body, raw, "/v2/models/tiny/infer_stream")
        assert stream.status_code == 200 and '"triton_final_response":true' in stream.text


def _split(response: httpx.Response) -> tuple[dict[str, Any], bytes]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/octet-stream"
    length = int(response.headers[_LENGTH])
    return json.loads(response.content[:length]), response.content[length:]


def test_all_outputs_come_as_raw_bytes_when_they_are_asked_for(server: Server) -> None:
    wanted = {"max_tokens": 5, "return_token_ids": True, "return_cumulative_logprob": True, "ignore_eos": True}
    plain = v2.rest_unary(server.url, _INFER, v2.rest_body("Hello", **wanted))
    body, raw = _split(_post(server, v2.rest_body("Hello", **wanted, binary_data_output=True)))
    assert all("data" not in output for output in body["outputs"])
    formats = {"UINT32": "I", "INT64": "q", "FP64": "d"}
    found: dict[str, list[Any]] = {}
    for output in body["outputs"]:
        size = output["parameters"]["binary_data_size"]
        part, raw = raw[:size], raw[size:]
        if output["datatype"] == "BYTES":
            found[output["name"]] = [part[4:].decode()]
            assert int.from_bytes(part[:4], "little") == size - 4
        else:
            found[output["name"]] = list(struct.unpack(f"<{output['shape'][0]}{formats[output['datatype']]}", part))
    assert raw == b"" and found == plain.outputs


def test_one_output_may_be_binary_and_the_other_not(server: Server) -> None:
    outputs = [{"name": "text_output", "parameters": {"binary_data": True}}, {"name": "finish_reason"}]
    body, raw = _split(_post(server, {**v2.rest_body("Hello", max_tokens=3), "outputs": outputs}))
    text, reason = body["outputs"]
    assert text["parameters"] == {"binary_data_size": len(raw)} and "data" not in text
    assert reason["data"] == ["length"]
    outputs[0]["parameters"] = {"binary_data": False}
    response = _post(server, {**v2.rest_body("Hello", max_tokens=3), "outputs": outputs})
    assert response.headers["content-type"] == "application/json" and _bytes(_text(response)) == raw


@pytest.mark.parametrize(
    ("raw", "shape", "size", "said"),
    [
        (_bytes("Hello"), [1], 10, "text_input: binary_data_size is 10, but only 9 bytes of the body are left"),
        (_bytes("Hello"), [1], 8, "text_input: its last element"),
        (_bytes("Hello") + b"more", [1], 9, "body: 4 bytes belong to no input"),
        (_bytes("Hello"), [2], 9, "text_input: shape [2] does not fit 1 elements"),
        (struct.pack("<I", 1) + b"\xff", [1], 5, "text_input: is not valid UTF-8"),
    ],
)
@pytest.mark.parametrize("endpoint", ["infer", "infer_stream"])
def test_sizes_that_do_not_fit_are_422_and_name_the_input(
    server: Server, endpoint: str, raw: bytes, shape: list[int], size: int, said: str
) -> None:
    tensor = _binary("text_input", "BYTES", shape, b"")
    tensor["parameters"]["binary_data_size"] = size
    response = _post(server, {"inputs": [tensor]}, raw, f"/v2/models/tiny/{endpoint}")
    assert (response.status_code, said in response.json()["error"]) == (422, True), response.text


@pytest.mark.parametrize("length", ["0", "-1", "1000000", "9" * 5000, "0" * 19 + "1" + "9" * 5000, "ten", ""])
def test_a_length_that_the_body_has_not_is_422(server: Server, length: str) -> None:
    response = _post(server, v2.rest_body("Hello"), **{_LENGTH: length})
    assert response.status_code == 422 and _LENGTH in response.json()["error"]


@pytest.mark.parametrize("spelling", ["{}", "0000000000000000000000{}", "{} ", "{}\t"])
def test_a_length_counts_without_its_zeros_and_white_space(server: Server, spelling: str) -> None:
    spelled = json.dumps(v2.rest_body("Hello", max_tokens=3)).encode()
    length = f"{_LENGTH}: {spelling.format(len(spelled))}"
    with raw.connected(server) as connection:
        connection.sendall(raw.post(_INFER, spelled, length, "Connection: close"))
        assert raw.read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_a_size_without_bytes_is_422(server: Server) -> None:
    body = {"inputs": [_binary("text_input", "BYTES", [1], _bytes("Hello"))]}
    response = plain_http.post(f"{server.url}{_INFER}", json=body, timeout=v2.TIMEOUT_S)
    assert response.status_code == 422 and "text_input" in response.json()["error"]


@pytest.mark.parametrize("endpoint", ["infer_stream", "generate_stream"])
def test_a_stream_refuses_binary_outputs_by_name(server: Server, endpoint: str) -> None:
    one = {"outputs": [{"name": "text_output", "parameters": {"binary_data": True}}]}
    for extra, name in ((one, "binary_data"), ({"parameters": {"binary_data_output": True}}, "binary_data_output")):
        body = {**v2.rest_body("Hello"), **extra}
        response = plain_http.post(f"{server.url}/v2/models/tiny/{endpoint}", json=body, timeout=v2.TIMEOUT_S)
        assert response.status_code == 422
        assert response.json()["error"].startswith(f"{name}: a stream of events has no binary outputs")


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
@pytest.mark.parametrize("nested", [True, False])
def test_flat_json_refuses_binary_outputs_by_name(server: Server, endpoint: str, nested: bool) -> None:
    asked = {"binary_data_output": True}
    body = {"text_input": "Hello", **({"parameters": asked} if nested else asked)}
    response = plain_http.post(f"{server.url}/v2/models/tiny/{endpoint}", json=body, timeout=v2.TIMEOUT_S)
    assert response.status_code == 422 and response.json()["error"].startswith("binary_data_output: flat JSON")


_TRITON = """
import sys
import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

client = triton.InferenceServerClient(sys.argv[1])
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("tiny")
prompt = triton.InferInput("text_input", [1], "BYTES")
prompt.set_data_from_numpy(np.array(["Grüße 🙂".encode()], dtype=np.object_))
longest = triton.InferInput("max_tokens", [1], "INT64")
longest.set_data_from_numpy(np.array([5], dtype=np.int64), binary_data=False)
outputs = [triton.InferRequestedOutput("text_output"), triton.InferRequestedOutput("num_output_tokens", False)]
texts = set()
for chosen in (None, outputs):
    for coding in (None, "gzip"):
        result = client.infer("tiny", [prompt, longest], outputs=chosen, request_compression_algorithm=coding)
        assert result.as_numpy("num_output_tokens").tolist() == [5]
        texts.add(result.as_numpy("text_output")[0].decode())
(text,) = texts
longest.set_data_from_numpy(np.array([0], dtype=np.int64))
try:
    client.infer("tiny", [prompt, longest])
except InferenceServerException as error:
    assert error.status() == "422" and "max_tokens" in error.message()
else:
    raise AssertionError("max_tokens of 0 is taken")
print(text, end="")
"""


def test_tritons_client_gets_the_text_with_its_defaults(server: Server) -> None:
    """Triton's client is a dependency of MLServer. It runs in a separate process, because it uses gevent."""
    target = server.url.removeprefix("http://")
    done = subprocess.run([sys.executable, "-c", _TRITON, target], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    plain = v2.rest_unary(server.url, _INFER, v2.rest_body("Grüße 🙂", max_tokens=5))
    assert done.stdout == plain.text
