"""Features of KServe's REST client for V2. This client supports only asyncio.

Knows nothing of the server beyond what ``features`` says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
from features import check_refused, feature, main
from kserve import InferenceRESTClient, InferRequest, RESTConfig
from kserve_requests import not_implemented, output, request, talk, text, values

_T = TypeVar("_T")


def _run(ask: Callable[[Any], Awaitable[_T]]) -> _T:
    async def run() -> _T:
        client = InferenceRESTClient(RESTConfig(protocol="v2"))
        try:
            return await ask(client)
        finally:
            await client.close()

    return asyncio.run(run())


def _infer(url: str, asked: InferRequest) -> dict[str, list[Any]]:
    return values(_run(lambda client: client.infer(url, asked, model_name=asked.model_name)))


@feature("models")
def models(url: str) -> None:
    async def ask(client: Any) -> None:
        assert await client.is_server_live(url) and await client.is_server_ready(url)
        assert await client.is_model_ready(url, "tiny") and not await client.is_model_ready(url, "nobody")

    _run(ask)


@feature("chat")
def chat(url: str) -> None:
    assert text(_infer(url, talk()))


@feature("prompts")
def prompts(url: str) -> None:
    assert text(_infer(url, request()))


@feature("log-probabilities")
def logprobs(url: str) -> None:
    (found,) = _infer(url, request(return_logprobs=True, top_logprobs=2))["logprobs"]
    assert [len(entry["top"]) for entry in json.loads(found)] == [2] * 5


@feature("parameters")
def parameters(url: str) -> None:
    """Tests tensors as JSON and as raw bytes, and chosen outputs."""
    whole = text(_infer(url, request()))
    assert (
        text(_infer(url, request(raw=True))) == text(_infer(url, request(raw=True, binary_data_output=True))) == whole
    )
    for raw in (True, False):
        chosen = [output("text_output", raw), output("num_output_tokens", True)]
        found = _infer(url, request(raw=raw, outputs=chosen))
        assert found == {"text_output": [whole], "num_output_tokens": [5]}, found


@feature("asyncio")
def asynchronous(url: str) -> None:
    async def ask(client: Any) -> list[str]:
        answers = await asyncio.gather(*(client.infer(url, request(), model_name="tiny") for _ in range(3)))
        return [text(values(answer)) for answer in answers]

    assert len(set(_run(ask))) == 1


def _refused(url: str, asked: InferRequest, status: int, said: str) -> None:
    error = check_refused(lambda: _infer(url, asked), httpx.HTTPStatusError, said)
    assert error.response.status_code == status, error


@feature("errors")
def errors(url: str) -> None:
    _refused(url, request(max_tokens=0), 422, "max_tokens: ")
    _refused(url, request(raw=True, model="nobody"), 404, "nobody not found")


@feature("tools, schemas, images")
def what_is_not_implemented(url: str) -> None:
    for name, asked in not_implemented().items():
        _refused(url, asked, 422, name)


main("kserve", "rest")
