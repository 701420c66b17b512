"""Holds the arguments of a call of the client, before they are written in a protocol.

Knows nothing of protocols and transports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Messages = Sequence[Mapping[str, Any]]
ModelsRequest = tuple[str, str, dict[str, Any] | None]  # method, path and body of the request for the models' names


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """Either one or several raw ``prompts``, or the ``messages`` of a chat."""

    model: str
    prompts: tuple[str, ...]
    messages: Messages | None
    parameters: Mapping[str, Any]


def generation_call(
    model: str, prompt: str | Sequence[str] | None, messages: Messages | None, parameters: Mapping[str, Any]
) -> GenerationCall:
    """A parameter of None is left out. Raises ValueError unless exactly one of ``prompt`` and ``messages`` is given."""
    if (prompt is None) == (messages is None):
        raise ValueError("give exactly one of prompt and messages")
    prompts = (prompt,) if isinstance(prompt, str) else tuple(prompt or ())
    given = {name: value for name, value in parameters.items() if value is not None}
    return GenerationCall(model, prompts, messages, given)
