"""Runs a client's features against a server, one after the other, and prints how each of them ended.

Imports the standard library alone: it runs in the client's own environment, beside the script of that client. The
server has the models ``tiny`` and ``narrow``; ``narrow`` runs one row at a time and has one place in its queue. Decode
steps are slowed down.
"""

from __future__ import annotations

import json
import re
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, TypeVar

QUESTION = [{"role": "user", "content": "Grüße"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
# Parameters of V2; `tools` itself is taken there, for the chat template.
NOT_IMPLEMENTED: dict[str, Any] = {"tool_choice": "required"}
_WAIT_S = 60.0
# The addresses of the server's ports; for openai also another server, whose model loads until there is a file.
GIVEN: dict[str, str] = json.loads(sys.argv[1])
_Feature = Callable[[str], None]
_features: list[tuple[str, _Feature]] = []
_T = TypeVar("_T")


def feature(name: str) -> Callable[[_Feature], _Feature]:
    """Registers a function that gets the server's address and fails if the feature does not work.

    ``name`` is a column of the table in docs/compatibility.md; several functions may have the same name.
    """

    def register(function: _Feature) -> _Feature:
        _features.append((name, function))
        return function

    return register


def main(distribution: str, *ports: str) -> None:
    """Prints a JSON object: the client's version, and for each feature null or the traceback of its first failure.

    Every feature is tried on each of the ``ports``.
    """
    ended: dict[str, str | None] = {}
    for name, function in _features:
        for port in ports:
            try:
                function(GIVEN[port])
                ended.setdefault(name, None)
            except Exception:
                ended[name] = ended.get(name) or traceback.format_exc()
    print(json.dumps({"version": version(distribution), "features": ended}))


def crowd(ask: Callable[[int], _T], count: int = 4) -> list[_T]:
    """Makes all calls at once, which are more than ``narrow`` accepts."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(ask, range(count), timeout=120))


def counter(name: str) -> float:
    """Returns one of the server's counters, summed over its models."""
    with urllib.request.urlopen(f"{GIVEN['rest']}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^torch_stream_{name}\{{.*\}} (\S+)$", text, re.MULTILINE))


def check_freed(leave: Callable[[], Any]) -> None:
    """``leave`` starts a generation of 900 tokens and leaves it; the server must cancel it soon."""
    before = counter("cancelled_sequences_total")
    leave()
    end = time.monotonic() + _WAIT_S
    while counter("cancelled_sequences_total") == before or counter("running_sequences"):
        assert time.monotonic() < end, "the generation goes on"
        time.sleep(0.05)


def check_refused(call: Callable[[], Any], kind: type[Exception], *said: str) -> Exception:
    """Returns the exception, whose text must contain all of ``said``."""
    try:
        call()
    except kind as error:
        missing = [each for each in said if each not in str(error)]
        assert not missing, f"{missing} not in {error!r}"
        return error
    raise AssertionError(f"not refused: {said}")
