"""``make soak``: sends short requests to all endpoints in turn. The server's memory, descriptors and threads must not
grow, and its token counts must be exact.

Knows the server only as a process with ports. The first quarter of the requests is the warm-up. Each endpoint gets a
request in each of its formats, and the answer is checked. The connections stay open. They use Python's
``http.client``, which takes a third of httpx's CPU time and so leaves more of it to the server.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from itertools import repeat
from pathlib import Path
from select import select
from typing import Any

import grpc
import httpx
import psutil

from benchmarks import machine
from benchmarks.answers import Ask
from benchmarks.endpoints import HOST, GrpcEndpoint, V2Spelling
from benchmarks.process import rss_mib
from benchmarks.results import FOLDER, Recorder, commit
from benchmarks.servers import EMBEDDED, Live, Ours
from benchmarks.sweep import started

_CLIENTS = 16  # half as many as the rows that the engine decodes together
_SAMPLES = 40
_WHEN = ("after_warm_up", "at_the_end")
_WARM_UP = _SAMPLES // 4
# How much the last quarter may exceed the quarter after the warm-up, however many requests there are.
_MOST = {"rss_mib": 32.0, "descriptors": 4, "threads": 4}  # descriptors and threads: some pools fill late
MODEL = Ours.model
TOKENS = 2
_METHODS = "/inference.GRPCInferenceService"
_TIMEOUT_S = 120.0
_FINAL = '"triton_final_response":true'
_PROMPT = "Once upon a time"
_LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'
_FORM = "multipart/form-data; boundary=soak"
_UPLOAD = (
    b'--soak\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--soak\r\n'
    b'Content-Disposition: form-data; name="file"; filename="rows.jsonl"\r\n\r\n%s\r\n--soak--\r\n' % _LINE
)
_ASK = Ask(_PROMPT, 0, TOKENS)
_GREEDY: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
_OPENAI = {"model": MODEL, "max_tokens": TOKENS, **_GREEDY}
_CHAT = {**_OPENAI, "messages": [{"role": "user", "content": _PROMPT}]}
_TEXT = {**_OPENAI, "prompt": _PROMPT}
_FLAT = {"text_input": _PROMPT, "max_tokens": TOKENS, **_GREEDY}
_RESPONSES = {"model": MODEL, "input": _PROMPT, "max_output_tokens": TOKENS, **_GREEDY}
_COUNTED, _DONE, _STREAMED = f'"completion_tokens":{TOKENS}', "[DONE]", {"stream": True}
_RESPONDED = [f'"output_tokens":{TOKENS}', '"incomplete"']
# The path and the body of each request, and the texts that its answer must have.
_GENERATING: Sequence[tuple[str, Mapping[str, Any], Sequence[str]]] = (
    (f"/v2/models/{MODEL}/infer", V2Spelling(MODEL).body(_ASK), [_FINAL]),
    (f"/v2/models/{MODEL}/infer_stream", V2Spelling(MODEL).body(_ASK), [_FINAL]),
    (f"/v2/models/{MODEL}/generate", _FLAT, ['"text_output"']),
    (f"/v2/models/{MODEL}/generate_stream", _FLAT, ['"text_output"']),
    ("/v1/completions", _TEXT, [_COUNTED]),
    ("/v1/completions", _TEXT | _STREAMED, [_DONE]),
    ("/v1/chat/completions", _CHAT, [_COUNTED]),
    ("/v1/chat/completions", _CHAT | _STREAMED, [_DONE]),
    ("/v1/completions", {**_TEXT, "structured_outputs": {"regex": "[a-z]{9}"}}, [_COUNTED]),
    ("/v1/responses", _RESPONSES, _RESPONDED),
    ("/v1/responses", _RESPONSES | _STREAMED, _RESPONDED),
)
_READ = (
    *("/v2/health/live", "/v2/health/ready", "/health", "/ping", "/metrics", "/v2"),
    *(f"/v2/models/{MODEL}{part}" for part in ("", "/ready", "/config", "/stats")),
    *("/v1/models", f"/v1/models/{MODEL}", "/v1/files", "/v1/batches", "/openai/v1/models"),
)


class WrongAnswer(Exception):
    """Raised if an answer is not the expected one. The message has the beginning of the answer."""


class SoakClient:
    """One client with its connections, which asks one request after the other."""

    def __init__(self, http_port: int, grpc_port: int) -> None:
        self._http = HTTPConnection(HOST, http_port, timeout=_TIMEOUT_S)
        self._channel = grpc.insecure_channel(f"{HOST}:{grpc_port}")
        self._message = GrpcEndpoint(grpc_port, MODEL).request(_ASK)
        self.requests: Sequence[Callable[[], int]] = (
            *(partial(self._generate, *each) for each in _GENERATING),
            *(partial(self._read, path) for path in _READ),
            self._grpc_unary,
            self._grpc_stream,
            self._grpc_live,
            self._file,
            self._index,
            self._refused,
        )

    def close(self) -> None:
        self._http.close()
        self._channel.close()

    def _ask(self, method: str, path: str, body: Any = None, kind: str = "application/json", status: int = 200) -> str:
        """Returns the answer. A ``body`` that is not bytes is sent as JSON. Raises WrongAnswer for another status."""
        if self._http.sock is not None and select([self._http.sock], [], [], 0)[0]:
            self._http.close()  # the server has closed it, as it does after some seconds without a request
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        self._http.request(method, path, content, {} if body is None else {"Content-Type": kind})
        reply = self._http.getresponse()
        text = reply.read().decode()
        if reply.status != status:
            raise WrongAnswer(f"{method} {path}: {reply.status} {text[:300]}")
        return text

    def _generate(self, path: str, body: Mapping[str, Any], expected: Sequence[str]) -> int:
        text = self._ask("POST", path, body)
        return _checked(text, all(each in text for each in expected) and text.count(_FINAL) <= 1)

    def _read(self, path: str) -> int:
        self._ask("GET", path)
        return 0

    def _file(self) -> int:
        """Sends four requests that leave nothing behind and count as one."""
        path = f"/v1/files/{json.loads(self._ask('POST', '/v1/files', _UPLOAD, _FORM))['id']}"
        self._ask("GET", path)
        content = self._ask("GET", f"{path}/content")
        self._ask("DELETE", path)
        return _checked(f"{path}: {content!r}", content == _LINE.decode(), 0)

    def _index(self) -> int:
        text = self._ask("POST", "/v2/repository/index", {})
        return _checked(text, MODEL in text, 0)

    def _refused(self) -> int:
        text = self._ask("POST", f"/v2/models/{MODEL}/generate", {**_FLAT, "unheard_of": 1}, status=422)
        return _checked(text, "unheard_of" in text, 0)

    def _grpc_unary(self) -> int:
        reply = self._channel.unary_unary(f"{_METHODS}/ModelInfer")(self._message, timeout=_TIMEOUT_S)
        return _checked(repr(reply[:300]), b"triton_final_response" in reply)

    def _grpc_stream(self) -> int:
        call = self._channel.stream_stream(f"{_METHODS}/ModelStreamInfer")
        replies = list(call(iter([self._message]), timeout=_TIMEOUT_S))
        return _checked(repr(replies[:3]), bool(replies) and b"finish_reason" in replies[-1])

    def _grpc_live(self) -> int:
        reply = self._channel.unary_unary(f"{_METHODS}/ServerLive")(b"", timeout=_TIMEOUT_S)
        return _checked(repr(reply), reply == b"\x08\x01", 0)


def _checked(shown: str, holds: bool, tokens: int = TOKENS) -> int:
    if not holds:
        raise WrongAnswer(shown[:300])
    return tokens


@dataclass(frozen=True)
class Held:
    """What the server's process holds after a number of requests, when no request is running."""

    requests: int
    rss_mib: float
    descriptors: int
    threads: int


def soak(server: Live, requests: int) -> tuple[list[Held], int, int]:
    """Returns the samples, the number of tokens in the answers, and the number that the server has counted."""
    clients = [SoakClient(server.http_port, server.grpc_port) for _ in range(_CLIENTS)]
    held, tokens, sent, began = [], 0, 0, time.monotonic()
    try:
        with ThreadPoolExecutor(_CLIENTS) as pool:
            for sample in range(_SAMPLES):
                until = requests * (sample + 1) // _SAMPLES
                numbers = iter(range(sent, until))
                tokens += sum(pool.map(_ask, clients, repeat(numbers)))
                sent = until
                held.append(held_by(server.pid, sent))
                rate = sent / (time.monotonic() - began)
                left = (requests - sent) / rate / 60
                print(f"  {held[-1]}, {rate:.0f} requests/s, {left:.0f} minutes left", file=sys.stderr, flush=True)
    finally:
        for client in clients:
            client.close()
    return held, tokens, counted_tokens(server.http_port)


def _ask(client: SoakClient, numbers: Iterator[int]) -> int:
    """Sends the requests with numbers that no other client has taken, until none are left."""
    return sum(client.requests[number % len(client.requests)]() for number in numbers)


def held_by(pid: int, requests: int) -> Held:
    process = psutil.Process(pid)
    return Held(requests, round(rss_mib([process]), 1), process.num_fds(), process.num_threads())


def counted_tokens(port: int) -> int:
    text = httpx.get(f"http://{HOST}:{port}/metrics", timeout=30).text
    series = f'torch_stream_generation_tokens_total{{model="{MODEL}"'
    return int(sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(series)))


def growth(held: Sequence[Held]) -> dict[str, tuple[float, float]]:
    """Returns the maximum of each value in the quarter after the warm-up, and in the last quarter."""
    quarter = len(held) // 4
    first, last = held[_WARM_UP : _WARM_UP + quarter], held[-quarter:]
    return {name: (max(getattr(x, name) for x in first), max(getattr(x, name) for x in last)) for name in _MOST}


def problems(held: Sequence[Held], tokens: int, counted: int) -> list[str]:
    """Returns a line for each value that grew too much after the warm-up, and one if the token counts differ."""
    found = [] if tokens == counted else [f"the answers have {tokens} tokens, but the server counted {counted}"]
    grown = growth(held).items()
    return found + [f"{name} grew from {a:g} to {b:g}" for name, (a, b) in grown if b - a > _MOST[name]]


def summary(result: Mapping[str, Any], held: Sequence[Held]) -> str:
    """Returns the figures as a row of docs/reliability.md."""
    pairs = {name: f"{first:g}, then {last:g}" for name, (first, last) in growth(held).items()}
    return (
        f"{result['requests']:,} requests in {result['seconds']:,.0f} s: MiB of RSS {pairs['rss_mib']}; "
        f"descriptors {pairs['descriptors']}; threads {pairs['threads']}; "
        f"{result['counted']:,} of {result['tokens']:,} tokens ({result['date'][:10]}, {result['cores']} cores, "
        f"{result['cpu']})"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Send short requests to all endpoints in turn.")
    parser.add_argument("--requests", type=int, default=1_000_000, help="how many (%(default)s)")
    parser.add_argument("--uri", default=EMBEDDED)
    parser.add_argument("--output", type=Path, default=FOLDER / f"{machine.chip()}.jsonl")
    arguments = parser.parse_args(argv)
    if arguments.requests < _SAMPLES:
        parser.error(f"--requests: must be at least {_SAMPLES}")
    described, began, ours = machine.describe(), time.monotonic(), Ours(arguments.uri)
    with started(ours) as server:
        held, tokens, counted = soak(server, arguments.requests)
    seconds = time.monotonic() - began
    figures = {"requests": arguments.requests, "seconds": seconds, "tokens": tokens, "counted": counted}
    head = {"run": described["date"], "name": "soak", "commit": commit(), "machine": described, "model": arguments.uri}
    recorder = Recorder(arguments.output, {**head, "servers": {ours.name: ours.versions()}}, again=True)
    grown = {
        f"{name}_{when}": most for name, pair in growth(held).items() for when, most in zip(_WHEN, pair, strict=True)
    }
    recorder.add((ours.name, "", "soak", 0), {**figures, **grown})
    print(summary({**described, **figures}, held))
    found = problems(held, tokens, counted)
    print(*(f"missed: {each}" for each in found), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
