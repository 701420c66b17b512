"""Parsed requests, for tests of replies, independent of any API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlserver_torch_stream.types import GenerationRequest, ReplyOptions, SamplingParameters, TextPrompt


def asked(
    *prompts: str, request_id: str = "r", sampling: Mapping[str, Any] | None = None, **reply: Any
) -> GenerationRequest:
    """Returns a request for answers to ``prompts``, by default to one. ``reply`` are fields of its ``ReplyOptions``."""
    texts = tuple(map(TextPrompt, prompts or ("x",)))
    return GenerationRequest(request_id, texts, SamplingParameters(**sampling or {}), ReplyOptions(**reply))
