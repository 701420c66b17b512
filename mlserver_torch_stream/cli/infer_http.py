"""Infers rows with a server over HTTP: V2 (MLServer and its like) or OpenAI's API, streamed or not.

Knows the two spellings; which rows there are and where answers go is none of its business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

import httpx

from mlserver_torch_stream.cli.adaptive import Concurrency, Gate
from mlserver_torch_stream.cli.completion import Answer, Ask, Asking, Unsuitable, each, failed
from mlserver_torch_stream.client import EventParser
from mlserver_torch_stream.cloud.faults import CloudError, Denied, Missing, Refused, Unavailable
from mlserver_torch_stream.cloud.retry import Retry
from mlserver_torch_stream.cloud.rows import Outcome, Row

Api = Literal["v2", "openai"]
_LATER = (408, 429, 502, 503, 504)
_SLOWER = (429, 503)
_MOST_ERROR_BYTES = 2000
_JSON = {"Content-Type": "application/json"}
_TRIES_OF_A_ROW = 3  # of what is the row's own failure, perhaps


class _Failed(CloudError):
    """The server's own failure at this row: tried again, then the row's."""

    code = "server_error"
    retriable = True


class _Rejected(CloudError):
    """The server has no answer for this row, and will have none."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


@dataclass
class HttpInfer:
    """The callable. At most ``most`` requests in flight, fewer while the server says 429 or 503.

    Raises Unavailable when the server does not answer for all of ``retry``, and Denied or Missing for the key or the
    model: then the run ends, to be resumed, instead of failing row after row.
    """

    url: str
    model: str
    api: Api
    asking: Asking
    most: int = 32
    stream: bool = True
    key: str | None = None
    timeout: float = 300.0  # seconds of silence
    retry: Retry = field(default_factory=lambda: Retry(tries=10, first=0.2, longest=30.0))

    def __post_init__(self) -> None:
        self.gate = Gate(Concurrency(self.most))
        self.retries = 0
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        limits = httpx.Limits(max_connections=self.most, max_keepalive_connections=self.most)
        timeout = httpx.Timeout(self.timeout, connect=10.0, pool=None)
        self._client = httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits, timeout=timeout)

    async def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        return await each(rows, self._one)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _one(self, row: Row) -> Outcome:
        try:
            ask = self.asking.ask(row)
            path, body = self._request(ask)
            content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except Unsuitable as error:
            return failed("unsuitable", str(error))
        except (ValueError, RecursionError) as error:  # half of a surrogate pair, NaN, no bottom
            return failed("invalid_request", f"cannot be sent as JSON: {error}")
        failures = 0

        async def attempt() -> Outcome:
            nonlocal failures
            try:
                return await self._attempt(path, content, ask)
            except _Failed as error:
                failures += 1
                if failures == _TRIES_OF_A_ROW:
                    raise _Rejected(error.message, error.code) from None
                raise

        try:
            return await self.retry.run(attempt, self._again)
        except _Rejected as error:
            return failed(error.code, error.message)

    def _again(self, error: CloudError) -> None:
        self.retries += 1

    def _request(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        if self.api == "openai":
            body = {**ask.parameters, "model": self.model, "stream": self.stream}
            if self.stream:
                body["stream_options"] = {"include_usage": True}
            if ask.chat:
                return "/v1/chat/completions", {**body, "messages": ask.messages}
            return "/v1/completions", {**body, "prompt": ask.prompt}
        parameters = dict(ask.parameters)
        name, text = ("messages", json.dumps(ask.messages)) if ask.chat else ("text_input", ask.prompt)
        inputs = [{"name": name, "shape": [1], "datatype": "BYTES", "data": [text]}]
        if "tools" in parameters:
            tools = json.dumps(parameters.pop("tools"))
            inputs.append({"name": "tools", "shape": [1], "datatype": "BYTES", "data": [tools]})
        end = "generate_stream" if self.stream else "infer"
        return f"/v2/models/{quote(self.model, safe='')}/{end}", {"inputs": inputs, "parameters": parameters}

    async def _attempt(self, path: str, content: bytes, ask: Ask) -> Outcome:
        concurrency = self.gate.concurrency
        async with self.gate.through() as started:
            try:
                async with self._client.stream("POST", path, content=content, headers=_JSON) as response:
                    if response.status_code != httpx.codes.OK:
                        if response.status_code in _SLOWER:
                            concurrency.refused(started)
                        raise self._refusal(response, await response.aread())
                    answer = await self._read(response)
            except httpx.HTTPError as error:
                raise Unavailable(f"{self.url}: {error or type(error).__name__}") from error
            concurrency.answered()
        return answer.outcome(self.model, ask.chat)

    async def _read(self, response: httpx.Response) -> Answer:
        answer = Answer()
        try:
            if not self.stream:
                self._take(answer, json.loads(await response.aread()))
                return answer
            parser, ended = EventParser(), False
            async for chunk in response.aiter_bytes():
                for event in parser.feed(chunk):
                    ended = ended or (event == "[DONE]" if self.api == "openai" else self._final(json.loads(event)))
                    if event != "[DONE]":
                        self._take(answer, json.loads(event))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise _Failed(f"the server's answer cannot be read: {type(error).__name__}: {error}") from None
        if not ended:
            raise Unavailable(f"{self.url}: the stream ended before its last event")
        return answer

    @staticmethod
    def _final(event: Mapping[str, Any]) -> bool:
        return bool((event.get("parameters") or {}).get("triton_final_response", False))

    def _take(self, answer: Answer, event: Mapping[str, Any]) -> None:
        if event.get("error"):
            raise _Failed(f"the generation failed: {_reason(event)}")
        if self.api == "openai":
            _take_openai(answer, event)
        else:
            _take_v2(answer, event)

    def _refusal(self, response: httpx.Response, body: bytes) -> CloudError:
        status = response.status_code
        text = f"{self.url} answered {status}: {_body_reason(body)}"
        if status in _LATER:
            return Unavailable(text, _seconds(response.headers.get("Retry-After")))
        if status in (401, 403):
            return Denied(text)
        if status == 404:
            return Missing(text)
        return _Failed(text) if status >= 500 else _Rejected(text)


def _take_openai(answer: Answer, event: Mapping[str, Any]) -> None:
    for choice in event["choices"]:
        said = choice.get("delta") or choice.get("message") or {}
        text = choice["text"] if "text" in choice else said.get("content")
        answer.add(choice["index"], text or "", choice.get("finish_reason"))
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage.get("completion_tokens", 0)


def _take_v2(answer: Answer, event: Mapping[str, Any]) -> None:
    parameters = event.get("parameters") or {}
    if parameters.get("error"):
        raise _Failed(f"the generation failed: {parameters['error']}")
    tensors = {tensor["name"]: tensor["data"] for tensor in event.get("outputs", ())}
    reasons = tensors.get("finish_reason") or [None]
    for offset, text in enumerate(tensors.get("text_output") or ()):
        reason = reasons[offset] if offset < len(reasons) else None
        answer.add(int(parameters.get("index", 0)) + offset, text, reason or None)
    answer.prompt_tokens = max([answer.prompt_tokens, *(tensors.get("num_input_tokens") or ())])
    answer.completion_tokens += sum(tensors.get("num_output_tokens") or ())


def _reason(event: Mapping[str, Any]) -> str:
    error = event["error"]
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _body_reason(body: bytes) -> str:
    try:
        return _reason(json.loads(body))
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:_MOST_ERROR_BYTES].decode("utf-8", "replace").strip()


def _seconds(header: str | None) -> float | None:
    """Retry-After in seconds; as a date it is not read."""
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None


async def only_model(url: str, api: Api, key: str | None) -> str:
    """The server's only model. Raises Refused where there is another number of them."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=10.0) as client:
            if api == "openai":
                answer = await client.get("/v1/models")
                names = [model["id"] for model in answer.raise_for_status().json()["data"]]
            else:
                answer = await client.post("/v2/repository/index", json={"ready": True})
                names = sorted({model["name"] for model in answer.raise_for_status().json()})
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise Refused(f"--url: {url} does not say which models it has ({error or type(error).__name__})") from None
    if len(names) != 1:
        raise Refused(f"--model: name one of the server's models: {', '.join(names) or 'it has none'}")
    return str(names[0])
