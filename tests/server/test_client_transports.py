"""Our client with a real server: REST and gRPC give the same events, and leaving an iterator frees its row."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing, closing
from itertools import islice
from typing import Any

import psutil
import pytest

from mlserver_torch_stream import client
from tests.server.harness import HOST, Server

_LONG: dict[str, Any] = {"max_tokens": 1000, "ignore_eos": True}
_MESSAGES = [{"role": "user", "content": "Grüße 🙂"}]
_CALLS: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "Hello fox", "max_tokens": 24},
    "chat": {"messages": _MESSAGES, "max_tokens": 24, "temperature": 0.7, "seed": 3},
    "all that may be asked for": {
        "prompt": "Hello fox",
        "max_tokens": 8,
        "top_logprobs": 3,
        "return_logprobs": True,
        "return_token_ids": True,
        "return_cumulative_logprob": True,
        "stop": ["no such text"],
    },
    "several prompts": {"prompt": ["Hello", "fox"], "max_tokens": 8, "n": 2, "temperature": 1.0, "seed": 3},
    "one response": {"prompt": ["Hello", "fox"], "max_tokens": 8, "stream": False, "return_token_ids": True},
}

Collect = Callable[..., list[client.Delta]]
Leave = Callable[..., None]


def _blocking(url: str, model: str, prompt: Any = None, **call: Any) -> list[client.Delta]:
    with client.Client(url, timeout=call.pop("timeout", 60)) as asked:
        return list(asked.stream(model, prompt, **call))


def _in_asyncio(url: str, model: str, prompt: Any = None, **call: Any) -> list[client.Delta]:
    async def collect() -> list[client.Delta]:
        async with client.AsyncClient(url, timeout=call.pop("timeout", 60)) as asked:
            return [delta async for delta in asked.stream(model, prompt, **call)]

    return asyncio.run(collect())


def _urls(server: Server) -> tuple[str, str]:
    return server.url, f"grpc://{server.grpc_target}"


def _transport(server: Server, name: str) -> dict[str, Any]:
    """Returns a Client's arguments for the transport."""
    rest, grpc = _urls(server)
    return {"rest": {"url": rest}, "grpc": {"url": grpc}}[name]


def _sequences(deltas: Sequence[client.Delta]) -> dict[int, tuple[Any, ...]]:
    """Returns what the events add up to, as the number of tokens in each event varies."""
    assert [delta.final for delta in deltas] == [False] * (len(deltas) - 1) + [True]

    def joined(part: Callable[[client.Delta], Iterable[Any]], index: int) -> tuple[Any, ...]:
        return tuple(each for delta in deltas if delta.index == index for each in part(delta))

    ends = {delta.index: delta for delta in deltas if delta.finish_reason is not None}
    return {
        index: (
            "".join(joined(lambda delta: delta.text, index)),
            joined(lambda delta: delta.token_ids, index),
            joined(lambda delta: delta.logprobs, index),
            end.finish_reason,
            end.cumulative_logprob,
            end.num_input_tokens,
            end.num_output_tokens,
        )
        for index, end in sorted(ends.items())
    }


@pytest.mark.parametrize("call", _CALLS.values(), ids=_CALLS)
def test_rest_and_grpc_blocking_and_in_asyncio_give_the_same_events(server: Server, call: dict[str, Any]) -> None:
    answers = [collect(url, "tiny", **call) for url in _urls(server) for collect in (_blocking, _in_asyncio)]
    first = _sequences(answers[0])
    prompts = 1 if isinstance(call.get("prompt", ""), str) else len(call["prompt"])
    assert list(first) == list(range(prompts * call.get("n", 1)))
    assert all(text and reason == "length" for text, _, _, reason, *_ in first.values())
    assert [_sequences(answer) for answer in answers[1:]] == [first] * 3
    usage = answers[0][-1].usage
    assert usage is not None and usage.completion_tokens == sum(end[-1] for end in first.values())
    assert {answer[-1].usage for answer in answers} == {usage}


def test_log_probabilities_and_ids_belong_to_the_same_tokens(server: Server) -> None:
    for url in _urls(server):
        ((_, ids, logprobs, _, cumulative, _, count),) = _sequences(
            _blocking(url, "tiny", **_CALLS["all that may be asked for"])
        ).values()
        assert [entry.token_id for entry in logprobs] == list(ids) and len(ids) == count == 8
        assert all(len(entry.top) == 3 and entry.top[0].logprob >= entry.logprob for entry in logprobs)
        assert cumulative == pytest.approx(sum(entry.logprob for entry in logprobs))


@pytest.mark.parametrize("collect", [_blocking, _in_asyncio])
@pytest.mark.parametrize(
    ("model", "parameters", "status", "said"),
    [("tiny", {"max_tokens": 0}, 422, "max_tokens"), ("nobody", {}, 404, "nobody"), ("tiny", {"x": 1}, 422, "x: ")],
)
def test_a_refusal_is_the_same_over_rest_and_grpc(
    server: Server, collect: Collect, model: str, parameters: dict[str, Any], status: int, said: str
) -> None:
    for url in _urls(server):
        with pytest.raises(client.RequestRefused, match=said) as refused:
            collect(url, model, "Hello", **parameters)
        assert refused.value.status == status


def test_a_full_queue_is_429_and_over_rest_says_when_to_come_back(slow: Server) -> None:
    rest, grpc = _urls(slow)

    async def refused_beside_a_full_queue() -> dict[str, client.RequestRefused]:
        refused = {}
        async with (
            client.AsyncClient(rest) as one,
            client.AsyncClient(grpc) as other,
            aclosing(one.stream("narrow", "Hello", **_LONG)) as running,
        ):
            await anext(running)
            waiting = asyncio.ensure_future(anext(other.stream("narrow", "Hello", **_LONG)))
            await asyncio.to_thread(slow.wait_for, "narrow", lambda now: now["waiting_requests"] == 1)
            for name, asked in (("rest", one), ("grpc", other)):
                with pytest.raises(client.RequestRefused) as caught:
                    await anext(asked.stream("narrow", "Hello"))
                refused[name] = caught.value
            waiting.cancel()
            await asyncio.wait([waiting])
        return refused

    refused = asyncio.run(refused_beside_a_full_queue())
    assert refused["rest"].status == refused["grpc"].status == 429
    assert refused["grpc"].retry_after is None, "the server sends no such metadata"
    assert refused["rest"].retry_after is not None and refused["rest"].retry_after >= 1
    slow.wait_for("narrow", lambda now: now["running_sequences"] == now["waiting_requests"] == 0)


def _leave_blocking(check: Callable[[], None], **transport: Any) -> None:
    with client.Client(**transport) as asked:
        with closing(asked.stream("tiny", "Hello", **_LONG)) as deltas:
            assert len(list(islice(deltas, 3))) == 3
        check()


def _leave_in_asyncio(check: Callable[[], None], **transport: Any) -> None:
    async def leave() -> None:
        async with client.AsyncClient(**transport) as asked:
            async for _ in asked.stream("tiny", "Hello", **_LONG):
                break
            await asyncio.to_thread(check)

    asyncio.run(leave())


def _leave_by_cancelling(check: Callable[[], None], **transport: Any) -> None:
    async def leave() -> None:
        begun = asyncio.Event()

        async def read(asked: client.AsyncClient) -> None:
            async for _ in asked.stream("tiny", "Hello", **_LONG):
                begun.set()

        async with client.AsyncClient(**transport) as asked:
            task = asyncio.ensure_future(read(asked))
            await begun.wait()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await asyncio.to_thread(check)

    asyncio.run(leave())


@pytest.mark.long
@pytest.mark.parametrize("transport", ["rest", "grpc"])
@pytest.mark.parametrize("leave", [_leave_blocking, _leave_in_asyncio, _leave_by_cancelling])
def test_leaving_the_iterator_frees_the_row_while_the_client_stays(slow: Server, leave: Leave, transport: str) -> None:
    before = slow.wait_for("tiny", lambda now: now["running_sequences"] == 0)

    def check() -> None:
        after = slow.wait_for("tiny", lambda now: now["cancelled_sequences"] == before["cancelled_sequences"] + 1)
        assert after["running_sequences"] == 0
        assert after["generation_tokens"] - before["generation_tokens"] < _LONG["max_tokens"]

    leave(check, **_transport(slow, transport))


@pytest.mark.parametrize("collect", [_blocking, _in_asyncio])
def test_a_server_that_falls_silent_is_left_after_the_timeout(slow: Server, collect: Collect) -> None:
    """Over REST, comments during a long prefill break the silence, so a listener that never answers is used instead."""
    with socket.create_server((HOST, 0)) as silent, pytest.raises(client.StreamBroken, match="before its first event"):
        collect(f"http://{HOST}:{silent.getsockname()[1]}", "tiny", "Hello", timeout=0.2)
    rest, grpc = _urls(slow)
    with closing(client.stream(rest, "narrow", "Hello", **_LONG)) as running:
        next(running)  # and the one behind it waits
        before = slow.counters("narrow")["cancelled_sequences"]
        with pytest.raises(client.StreamBroken, match="no data arrived for 1 s"):
            collect(grpc, "narrow", "Hello", timeout=1.0, **_LONG)
        slow.wait_for("narrow", lambda now: now["cancelled_sequences"] == before + 1 and now["waiting_requests"] == 0)
    slow.wait_for("narrow", lambda now: now["running_sequences"] == 0)


def test_the_ready_models_are_named_over_every_transport(server: Server) -> None:
    async def in_asyncio(**transport: Any) -> list[str]:
        async with client.AsyncClient(**transport) as asked:
            return await asked.models()

    names = ["foreign", "narrow", "other", "tight", "tiny"]
    for transport in ("rest", "grpc"):
        with client.Client(**_transport(server, transport)) as asked:
            assert asked.models() == asyncio.run(in_asyncio(**_transport(server, transport))) == names


def _connections(port: int) -> set[int]:
    """Returns the local ports of this process's connections to a server's port."""
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr.port for each in connections if each.raddr and each.raddr.port == port}


def test_a_connection_is_kept_for_the_next_call(slow: Server) -> None:
    """Over REST the connection of a stream that was left cannot be used again; the next call opens another one."""
    for url, port in zip(_urls(slow), (slow.http_port, slow.grpc_port), strict=True):
        others = _connections(port)
        with client.Client(url) as asked:
            texts, kept = [], []
            for _ in range(2):
                texts.append("".join(map(str, asked.stream("tiny", "Hello", max_tokens=8))))
                kept.append(_connections(port) - others)
            assert kept[0] == kept[1] and len(kept[0]) == 1
            next(asked.stream("tiny", "Hello", **_LONG))
            texts.append("".join(map(str, asked.stream("tiny", "Hello", max_tokens=8))))
        assert texts[0] == texts[1] == texts[2] != ""
