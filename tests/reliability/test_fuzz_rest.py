"""Any JSON to any route of a registered model is understood, or refused with a reason, but never a server error."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.protocol.test_v2_fuzz import any_text, json_value, options, parameters, prompt, tensor
from tests.reliability.conftest import MAX_BODY
from tests.server import v2
from tests.server.harness import Server

_PATHS = tuple(f"/v2/models/small/{endpoint}" for endpoint in ("infer", "infer_stream", "generate", "generate_stream"))
_UNDERSTOOD = {200, 413, 415, 422, 504}  # 504: a timeout of microseconds can be asked for
_FAST, _SLOW = 60, 2000  # examples of each of the five kinds


def _json(value: Any) -> bytes:
    """Encodes a value as Python does: with NaN, Infinity and lone surrogates, which are not JSON."""
    return json.dumps(value).encode()


request = st.fixed_dictionaries(
    {"inputs": st.lists(tensor | prompt, max_size=4)},
    optional={
        "id": any_text | json_value,
        "parameters": parameters | json_value,
        "outputs": json_value | st.lists(st.fixed_dictionaries({"name": any_text}), max_size=3),
    },
)
flat = st.fixed_dictionaries({"text_input": any_text | json_value}, optional={"id": json_value}).flatmap(
    lambda body: options.map(lambda more: {**more, **body})
)
mutated = st.tuples(request.map(_json), st.integers(0, 400), st.binary(max_size=4)).map(
    lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + len(parts[2]) :]
)
sized = st.integers(MAX_BODY - 40, MAX_BODY + 40).map(
    lambda size: _json({"inputs": [v2.bytes_tensor("text_input", "x")], "id": ""}).ljust(size)
)
deep = st.tuples(st.integers(1, 5000), st.sampled_from([b"[", b'{"a":', b'{"inputs":[', b'{"parameters":{"x":'])).map(
    lambda parts: parts[1] * parts[0]
)
bodies = {
    "requests": request.map(_json),
    "flat": flat.map(_json),
    "mutated": mutated | st.binary(max_size=300),
    "other": json_value.map(_json) | deep,
    "sized": sized | sized.map(gzip.compress) | st.integers(1, 4000).map(lambda n: gzip.compress(b" " * n * 1000)),
}


# What a kind must come to at least once, or it tries nothing.
_REACHES = {"requests": {200, 422}, "flat": {200, 422}, "mutated": {422}, "other": {422}, "sized": {200, 413}}


def fuzz(server: Server, kind: str, examples: int) -> None:
    seen: set[int] = set()
    with httpx.Client(verify=False, base_url=server.url, timeout=v2.TIMEOUT_S) as client:

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(body=bodies[kind], path=st.sampled_from(_PATHS), packed=st.booleans())
        def answers(body: bytes, path: str, packed: bool) -> None:
            seen.add(_answers(client.post, body, path, packed or body.startswith(b"\x1f\x8b")))

        answers()
        assert client.get("/v2/models/small/ready").status_code == 200
        assert client.post("/v2/models/small/infer", json=v2.rest_body("Hello")).status_code == 200
    assert server.process.poll() is None
    if examples == _SLOW:  # few may all be bad
        assert seen >= _REACHES[kind]


def _answers(post: Callable[..., httpx.Response], body: bytes, path: str, packed: bool) -> int:
    response = post(path, content=body, headers={"Content-Encoding": "gzip"} if packed else {})
    assert response.status_code in _UNDERSTOOD, (response.status_code, response.text)
    if response.status_code != 200:
        assert response.json()["error"] and response.headers["content-type"] == "application/json"
    elif b'"error":' in response.content and "stream" in path:
        raise AssertionError(f"a stream failed: {response.text[-500:]}")
    if not packed and len(body) > MAX_BODY:
        assert response.status_code == 413
    return response.status_code


@pytest.mark.long
@pytest.mark.parametrize("kind", bodies)
def test_hundreds_of_bodies(plain: Server, kind: str) -> None:
    fuzz(plain, kind, _FAST)


@pytest.mark.slow
@pytest.mark.parametrize("kind", bodies)
def test_ten_thousand_bodies(plain: Server, kind: str) -> None:
    fuzz(plain, kind, _SLOW)
