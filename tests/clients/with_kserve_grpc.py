"""Features of KServe's gRPC client for V2, on MLServer's port and on Triton's. This client supports only asyncio.

Knows nothing of the server beyond what ``features`` says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from features import check_refused, feature, main
from kserve import InferenceGRPCClient, InferRequest
from kserve_requests import not_implemented, request, talk, text, values

_T = TypeVar("_T")


def _run(target: str, ask: Callable[[Any], Awaitable[_T]]) -> _T:
    async def run() -> _T:
        client = InferenceGRPCClient(target)
        try:
            return await ask(client)
        finally:
            await client.close()

    return asyncio.run(run())


def _infer(target: str, asked: InferRequest) -> dict[str, list[Any]]:
    return values(_run(target, lambda client: client.infer(asked)))


@feature("models")
def models(target: str) -> None:
    async def ask(client: Any) -> None:
        assert await client.is_server_live() and await client.is_server_ready()
        assert await client.is_model_ready("tiny")

    _run(target, ask)


@feature("chat")
def chat(target: str) -> None:
    assert text(_infer(target, talk()))


@feature("prompts")
def prompts(target: str) -> None:
    assert text(_infer(target, request()))


@feature("log-probabilities")
def logprobs(target: str) -> None:
    (found,) = _infer(target, request(return_logprobs=True, top_logprobs=2))["logprobs"]
    assert [len(entry["top"]) for entry in json.loads(found)] == [2] * 5


@feature("parameters")
def parameters(target: str) -> None:
    """Tests ordinary and raw contents."""
    assert text(_infer(target, request())) == text(_infer(target, request(raw=True)))


@feature("asyncio")
def asynchronous(target: str) -> None:
    async def ask(client: Any) -> list[str]:
        answers = await asyncio.gather(*(client.infer(request()) for _ in range(3)))
        return [text(values(answer)) for answer in answers]

    assert len(set(_run(target, ask))) == 1


def _refused(target: str, asked: InferRequest, code: Any, said: str) -> None:
    error = check_refused(lambda: _infer(target, asked), grpc.RpcError)
    assert error.code() is code and said in error.details(), error


@feature("errors")
def errors(target: str) -> None:
    _refused(target, request(max_tokens=0), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens: ")
    _refused(target, request(raw=True, model="nobody"), grpc.StatusCode.NOT_FOUND, "nobody")


@feature("tools, schemas, images")
def what_is_not_implemented(target: str) -> None:
    for name, asked in not_implemented().items():
        _refused(target, asked, grpc.StatusCode.INVALID_ARGUMENT, name)


main("kserve", "grpc", "triton")
