"""Lets a server generate text for prompts, over V2's path ``generate_stream`` or OpenAI's API."""

from __future__ import annotations

import json
import time
from typing import Any

import aiohttp

from mlserver_torch_stream.client import EventParser
from mlserver_torch_stream.client.call import GenerationCall
from mlserver_torch_stream.client.v2_json import http_request
from mlserver_torch_stream.cloud.answers import GenerationBroke, HttpAnswer, OpenAIAnswer, V2ServerAnswer, parse
from mlserver_torch_stream.cloud.endpoint import BROKEN, JSON, UNSENDABLE, RowBackend, RowFailed, unreadable, unsent
from mlserver_torch_stream.cloud.requests import RowQuestion
from mlserver_torch_stream.cloud.rows import Outcome, Row, StoreUnavailable


class GenerationBackend(RowBackend):
    """Sends a generation request for each row, and reads a streamed or a whole answer."""

    async def _one(self, row: Row) -> Outcome:
        try:
            ask = self.endpoint.rows.ask(row)
            path, body = self._request(ask)
            content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except UNSENDABLE as error:
            return unsent(error)
        return await self._tried(lambda alone: self._attempt(path, content, ask))

    def _request(self, ask: RowQuestion) -> tuple[str, dict[str, Any]]:
        if self.endpoint.api == "openai":
            body: dict[str, Any] = {**ask.body, "model": self.model, "stream": self.endpoint.stream}
            if self.endpoint.stream:
                body["stream_options"] = {"include_usage": True}
            return ask.path, body
        # The prompt is None in a chat, which has messages, and in a row without a prompt, which the server refuses.
        prompts: Any = (ask.prompt,)
        call = GenerationCall(self.model, prompts, ask.messages, ask.v2_parameters)
        return http_request(call, self.endpoint.stream)

    async def _attempt(self, path: str, content: bytes, ask: RowQuestion) -> Outcome:
        name = self.endpoint.name or self.model
        answer = OpenAIAnswer() if self.endpoint.api == "openai" else V2ServerAnswer(name, ask.chat)
        async with self.gate.through() as started:
            began = time.monotonic()
            async with self._answered(started, path, content, JSON) as response:
                body = await self._read(response, answer)
        span = began, time.monotonic()
        return Outcome(body, None, answer.prompt_tokens, answer.completion_tokens, span)

    async def _read(self, response: aiohttp.ClientResponse, answer: HttpAnswer) -> dict[str, Any]:
        """Returns the answer as OpenAI's object. Raises CloudError if the generation fails or the answer cannot be
        read.
        """
        try:
            if not self.endpoint.stream:
                answer.whole(parse(await response.read()))
                return answer.body()
            parser, ended = EventParser(), False
            async for chunk in response.content.iter_any():
                for event in parser.feed(chunk):
                    ended = answer.event(event) or ended
            if ended:
                return answer.body()
        except GenerationBroke as error:
            raise RowFailed(f"the generation failed: {error}", BROKEN, error.error) from None
        except aiohttp.ClientError:
            raise
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise unreadable(error) from None
        raise StoreUnavailable(f"{self._url}: the stream ended before its last event")
