"""What a client sends appears in no log line and no span, and its headers in no reply.

Each API is called on each of its paths, with a prompt that is answered and with a request that is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import httpx
import pytest

from mlserver_torch_stream.protocol.spellings import REST_ROUTES
from tests import plain_http
from tests.server import openai, v2
from tests.server.harness import Server
from tests.server.otlp import Collector
from tests.waiting import wait_until

_CANARY = "canary-of-the-prompt"
_SECRET = "canary-of-a-header"
_HEADERS = {"Authorization": f"Bearer {_SECRET}", "Cookie": f"session={_SECRET}", "X-Secret": _SECRET}
_METADATA = tuple((name.lower(), value) for name, value in _HEADERS.items())
_LAST_ID = "privacy-last"


def _flat(**more: Any) -> dict[str, Any]:
    return {"text_input": _CANARY, "max_tokens": 2, **more}


def _tensors(**more: Any) -> dict[str, Any]:
    return v2.rest_body(_CANARY, max_tokens=2, **more)


def _seldon(**more: Any) -> dict[str, Any]:
    tensors = [v2.bytes_tensor("role", "user"), v2.bytes_tensor("content", _CANARY), v2.bytes_tensor("type", "text")]
    return v2.rest_body(inputs=tensors, max_tokens=2, **more)


def _chat(**more: Any) -> dict[str, Any]:
    return {**openai.talk(_CANARY), "max_tokens": 2, **more}


def _responses(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": _CANARY, "max_output_tokens": 2, **more}


def _messages(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": _CANARY}], "max_tokens": 2, **more}


def _counted(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": _CANARY}], **more}


def _tokens(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": _CANARY, **more}


def _ids(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "tokens": [7], **more}


def _text(**more: Any) -> dict[str, Any]:
    return {**openai.prompt(_CANARY), "max_tokens": 2, **more}


# A spelling that is not in this table fails the walk. A wrong value is a refusal that quotes it to the client.
_BODIES = {
    "FlatGenerate": _flat,
    "V2Tensors": _tensors,
    "SeldonChat": _seldon,
    "OpenAIChat": _chat,
    "OpenAICompletions": _text,
    "OpenAIResponses": _responses,
    "AnthropicMessages": _messages,
    "AnthropicTokenCount": _counted,
    "Tokenize": _tokens,
    "Detokenize": _ids,
}
_OPENAIS = ("/v1", "/openai", "/tokenize", "/detokenize")  # their refusals are 400


def _requests() -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yields paths, bodies and the expected statuses."""
    for route in REST_ROUTES:
        path = route.path.format(model_name="tiny", model_version="v1")
        for spelling in route.spellings:
            body = _BODIES[type(spelling).__name__]
            for more in ({}, {"stream": True}) if route.streaming is None else ({},):
                yield path, body(**more), 200
            yield path, body(temperature=_CANARY), 400 if path.startswith(_OPENAIS) else 422
        yield path, {_CANARY: _CANARY}, 400 if path.startswith(_OPENAIS) else 422


def _rest(server: Server) -> Iterator[str]:
    """Yields the content of the replies, including headers."""
    with httpx.Client(verify=False, headers=_HEADERS, timeout=v2.TIMEOUT_S, base_url=server.url) as asking:
        for path, body, status in _requests():
            response = asking.post(path, json=body)
            assert response.status_code == status, (path, response.text)
            yield f"{response.headers}{response.text}"
        broken = asking.post("/v2/models/tiny/infer", content=f'{{"text_input": "{_CANARY}')
        assert broken.status_code == 422
        yield f"{broken.headers}{broken.text}"


def _grpc(server: Server) -> Iterator[str]:
    """Yields the content of the replies, including metadata, on MLServer's port and Triton's, unary and streaming."""
    good = v2.grpc_request("tiny", _CANARY, max_tokens=2)
    bad = v2.grpc_request("tiny", _CANARY, temperature=_CANARY)
    for target in (server.grpc_target, server.triton_target):
        with grpc.insecure_channel(target) as channel:
            for method in ("ModelInfer", "ModelStreamInfer"):
                for request in (good, bad):
                    call = channel.stream_stream(f"/inference.GRPCInferenceService/{method}")(
                        iter([request.SerializeToString()]), metadata=_METADATA, timeout=v2.TIMEOUT_S
                    )
                    with suppress(grpc.RpcError):
                        yield str(list(call))
                    yield f"{call.details()}{call.initial_metadata()}{call.trailing_metadata()}"


@pytest.mark.long
def test_prompts_are_in_no_log_and_no_span_and_headers_in_no_reply(observed: Server, spans: Collector) -> None:
    replies = [*_rest(observed), *_grpc(observed)]
    assert any(_CANARY in reply for reply in replies)  # a refusal tells the client what was wrong
    assert [reply for reply in replies if _SECRET in reply] == []
    last = {**_tensors(), "id": _LAST_ID}
    plain_http.post(f"{observed.url}/v2/models/tiny/infer", json=last, timeout=v2.TIMEOUT_S)
    found = spans.wait_for(lambda all_spans: _LAST_ID in str(all_spans))
    generating = [path for path, *_ in _requests() if "token" not in path]  # a prompt that is counted is in no log
    assert observed.log.count("request_id=") > len(generating)
    for where in (observed.log, str(found)):
        assert _CANARY not in where and _SECRET not in where


def test_what_a_handler_is_sent_is_in_no_log(failing: Server) -> None:
    response = plain_http.post(
        f"{failing.url}/predictions/handler",
        json={"data": _CANARY},
        headers={**_HEADERS, "X-Request-Id": _LAST_ID},
        timeout=v2.TIMEOUT_S,
    )
    assert response.status_code == 200 and _SECRET not in f"{response.headers}{response.text}"
    _wait_for_line(failing, _LAST_ID)
    assert _CANARY not in failing.log and _SECRET not in failing.log


@pytest.mark.parametrize("name", ["tiny", "nothing"])
def test_a_query_is_in_no_log(observed: Server, name: str) -> None:
    last = {**_tensors(), "id": f"{_LAST_ID}-{name}"}
    for path in (f"{name}/infer?key={_SECRET}", "tiny/infer"):
        plain_http.post(f"{observed.url}/v2/models/{path}", json=last, timeout=v2.TIMEOUT_S)
    _wait_for_line(observed, last["id"], 1 if name == "nothing" else 2)
    assert _SECRET not in observed.log


def _wait_for_line(server: Server, request_id: str, count: int = 1) -> None:
    """Waits until the log has the lines of requests, which are written just after the answers are sent."""
    wait_until(lambda: server.log.count(f"request_id={request_id} ") == count, "the line of the request")
