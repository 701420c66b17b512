"""Features of httpx with a server that speaks the V2 protocol and Triton's generate extension over REST.

Knows nothing of the server beyond what ``features`` says.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from features import NOT_IMPLEMENTED, QUESTION, check_freed, check_refused, feature, main

_PLAIN = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.8, "seed": 5}
_LONG = {"max_tokens": 900, "ignore_eos": True}
_TIMEOUT_S = 60
_PATH = "/v2/models/tiny"


def _tensor(name: str, *values: str) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(values)], "data": list(values)}


def _body(*tensors: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    return {"inputs": list(tensors or [_tensor("text_input", "Hello")]), "parameters": {**_PLAIN, **parameters}}


def _talk(**parameters: Any) -> dict[str, Any]:
    return _body(_tensor("messages", json.dumps(QUESTION)), **parameters)


def _post(url: str, endpoint: str, body: dict[str, Any], path: str = _PATH) -> Any:
    return httpx.post(f"{url}{path}/{endpoint}", json=body, timeout=_TIMEOUT_S).raise_for_status().json()


def _outputs(reply: dict[str, Any]) -> dict[str, list[Any]]:
    return {tensor["name"]: tensor["data"] for tensor in reply["outputs"]}


def _events(url: str, endpoint: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", f"{url}{_PATH}/{endpoint}", json=body, timeout=_TIMEOUT_S) as response:
        response.raise_for_status()
        return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]


def _joined(events: list[dict[str, Any]]) -> str:
    assert [event["parameters"]["triton_final_response"] for event in events] == [False] * (len(events) - 1) + [True]
    return "".join(_outputs(event)["text_output"][0] for event in events)


@feature("models")
def models(url: str) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", f"{_PATH}/ready"):
        assert httpx.get(f"{url}{path}").status_code == 200
    assert httpx.get(f"{url}/v2").json()["name"] == "mlserver"
    assert "text_input" in [tensor["name"] for tensor in httpx.get(f"{url}{_PATH}").json()["inputs"]]
    index = {model["name"]: model["state"] for model in httpx.post(f"{url}/v2/repository/index", json={}).json()}
    assert index["tiny"] == "READY"
    assert httpx.get(f"{url}{_PATH}/config").json()["model_transaction_policy"] == {"decoupled": True}


@feature("chat")
def chat(url: str) -> None:
    found = _outputs(_post(url, "infer", _talk()))
    assert found["text_output"][0] and found["num_output_tokens"] == [12] and found["finish_reason"] == ["length"]


@feature("chat, streamed")
def chat_streamed(url: str) -> None:
    assert [_joined(_events(url, "infer_stream", _talk()))] == _outputs(_post(url, "infer", _talk()))["text_output"]


@feature("prompts")
def prompts(url: str) -> None:
    one = _outputs(_post(url, "infer", _body()))["text_output"]
    two = _outputs(_post(url, "infer", _body(_tensor("text_input", "Hello", "Hello"), temperature=0)))
    assert len(set(two["text_output"])) == 1 and len(two["text_output"]) == 2
    assert [_post(url, "generate", {"text_input": "Hello", **_PLAIN})["text_output"]] == one


@feature("prompts, streamed")
def prompts_streamed(url: str) -> None:
    whole = _outputs(_post(url, "infer", _body()))["text_output"][0]
    assert _joined(_events(url, "infer_stream", _body())) == whole == _joined(_events(url, "generate_stream", _body()))
    flat = _events(url, "generate_stream", {"text_input": "Hello", **_PLAIN})
    assert "".join(event["text_output"] for event in flat) == whole


@feature("log-probabilities")
def logprobs(url: str) -> None:
    asked = _body(return_logprobs=True, top_logprobs=2)
    entries = json.loads(_outputs(_post(url, "infer", asked))["logprobs"][0])
    assert len(entries) == 12 and all(len(entry["top"]) == 2 for entry in entries)


@feature("parameters")
def parameters(url: str) -> None:
    body = {**_body(top_k=40, min_p=0.01, n=2, stop=["zz"]), "id": "mine", "outputs": [{"name": "text_output"}]}
    reply = _post(url, "infer", body)
    assert reply["id"] == "mine" and [tensor["name"] for tensor in reply["outputs"]] == ["text_output"]
    assert reply["outputs"][0]["shape"] == [2]


@feature("asyncio")
def asynchronous(url: str) -> None:
    async def ask() -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as client:
            replies = await asyncio.gather(*(client.post(f"{_PATH}/infer", json=_body()) for _ in range(3)))
            return [_outputs(reply.json())["text_output"][0] for reply in replies]

    first, *others = asyncio.run(ask())
    assert first and others == [first] * 2


def _refused(url: str, endpoint: str, body: dict[str, Any], status: int, said: str, path: str = _PATH) -> None:
    error = check_refused(lambda: _post(url, endpoint, body, path), httpx.HTTPStatusError)
    assert error.response.status_code == status and said in error.response.json()["error"], error.response.text


@feature("errors")
def errors(url: str) -> None:
    for endpoint in ("infer", "infer_stream", "generate", "generate_stream"):
        _refused(url, endpoint, _body(max_tokens=0), 422, "max_tokens: ")
        _refused(url, endpoint, _body(), 404, "nobody", "/v2/models/nobody")


@feature("errors in a stream")
def errors_in_a_stream(url: str) -> None:
    """When its time is over, a stream ends with that reason and the text so far."""
    events = _events(url, "infer_stream", _body(max_tokens=900, timeout=1_500_000))
    assert _joined(events) and _outputs(events[-1])["finish_reason"] == ["timeout"]


@feature("leaving")
def leaving(url: str) -> None:
    def leave() -> None:
        asked = {"json": {**_body(), "parameters": _LONG}, "timeout": _TIMEOUT_S}
        with httpx.stream("POST", f"{url}{_PATH}/infer_stream", **asked) as response:
            next(response.iter_lines())

    check_freed(leave)


@feature("tools, schemas, images")
def what_is_not_implemented(url: str) -> None:
    for name, value in NOT_IMPLEMENTED.items():
        _refused(url, "infer", _talk(**{name: value}), 422, name)


main("httpx", "rest")
