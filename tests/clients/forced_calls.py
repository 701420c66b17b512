"""A proxy between an agent and the server that turns the model's first answers into calls of one of the agent's tools.

A random model calls no tools by itself. The proxy leaves one tool in the body, with a schema that matches only the
wanted arguments, and forces its call; so the events of the call are the server's own. Later bodies pass unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from tests import plain_http
from tests.scripted_http import Handler, serving
from tests.server.harness import Server

CALLS = 2  # turns of a conversation before its last one
_TIMEOUT_S = 300


def anthropic_call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a body of ``/v1/messages`` that force the call."""
    tool = {"name": name, "input_schema": _only(arguments), "strict": True}
    return {"tools": [tool], "tool_choice": {"type": "tool", "name": name}}


def responses_call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a body of ``/v1/responses`` that force the call."""
    tool = {"type": "function", "name": name, "parameters": _only(arguments), "strict": True}
    return {"tools": [tool], "tool_choice": {"type": "function", "name": name}}


def _only(arguments: Mapping[str, Any]) -> dict[str, Any]:
    properties = {key: {"const": value} for key, value in arguments.items()}
    return {"type": "object", "properties": properties, "required": list(arguments), "additionalProperties": False}


@contextmanager
def forced_calls(server: Server, call: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[dict[str, Any], int]]]]:
    """Yields the proxy's address, and the bodies with tools as the agent sent them, each with the answer's status.

    ``call`` has the fields that force the call.
    """
    sent: list[tuple[dict[str, Any], int]] = []

    class Proxy(_Proxy):
        url = server.url
        forced = call
        bodies = sent

    with serving(Proxy) as url:
        yield url, sent


class _Proxy(Handler):
    url: ClassVar[str]
    forced: ClassVar[Mapping[str, Any]]
    bodies: ClassVar[list[tuple[dict[str, Any], int]]]

    def do_POST(self) -> None:
        body = json.loads(self.received())
        forces = bool(body.get("tools")) and len(self.bodies) < CALLS
        asked = {**body, **self.forced} if forces else body
        answer = plain_http.post(f"{self.url}{self.path}", json=asked, timeout=_TIMEOUT_S)
        if body.get("tools"):
            self.bodies.append((body, answer.status_code))
        self.answer(answer.status_code, answer.content, {"Content-Type": answer.headers["content-type"]})
