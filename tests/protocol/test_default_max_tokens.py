"""Without ``max_tokens``, answers to messages may fill the context, and answers to prompts have up to 256 tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlserver_torch_stream.protocol.anthropic_spelling import ANTHROPIC_SPELLINGS
from mlserver_torch_stream.protocol.generate import FLAT
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_SPELLINGS
from mlserver_torch_stream.protocol.seldon_spelling import SELDON
from mlserver_torch_stream.protocol.spelling import PostedBody, Spelling
from mlserver_torch_stream.protocol.v2_reply import V2
from mlserver_torch_stream.types import ModelInfo
from tests.server import v2

_TALK = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
_PATHS = {**OPENAI_SPELLINGS, **ANTHROPIC_SPELLINGS}
_CONVERSATIONS: dict[str, tuple[Spelling, dict[str, Any]]] = {
    "chat": (_PATHS["/v1/chat/completions"], _TALK),
    "responses": (_PATHS["/v1/responses"], {"model": "m", "input": "Hi"}),
    "messages": (_PATHS["/v1/messages"], _TALK),
    "seldon": (SELDON, v2.rest_body(inputs=[v2.bytes_tensor("role", "user"), v2.bytes_tensor("content", "Hi")])),
    "v2": (V2, v2.rest_body(inputs=[v2.bytes_tensor("messages", '[{"role": "user", "content": "Hi"}]')])),
}
_PROMPTS: dict[str, tuple[Spelling, dict[str, Any]]] = {
    "completions": (_PATHS["/v1/completions"], {"model": "m", "prompt": "Hi"}),
    "v2": (V2, v2.rest_body("Hi")),
    "flat": (FLAT, {"text_input": "Hi"}),
}


def _max_tokens(spelling: Spelling, body: dict[str, Any], info: ModelInfo) -> int | None:
    return spelling.decode(PostedBody(body), info, streaming=False, request_id="r").sampling.max_tokens


@pytest.mark.parametrize(("spelling", "body"), _CONVERSATIONS.values(), ids=_CONVERSATIONS)
def test_an_answer_in_a_conversation_has_no_bound(spelling: Spelling, body: dict[str, Any], info: ModelInfo) -> None:
    assert _max_tokens(spelling, body, info) is None


@pytest.mark.parametrize(("spelling", "body"), _PROMPTS.values(), ids=_PROMPTS)
def test_an_answer_to_a_prompt_has_256_tokens(spelling: Spelling, body: dict[str, Any], info: ModelInfo) -> None:
    assert _max_tokens(spelling, body, info) == 256


@pytest.mark.parametrize(
    ("spelling", "body"),
    [*_CONVERSATIONS.values(), *_PROMPTS.values()],
    ids=[*(f"{name} with messages" for name in _CONVERSATIONS), *_PROMPTS],
)
def test_a_default_of_the_model_bounds_both(spelling: Spelling, body: dict[str, Any], info: ModelInfo) -> None:
    assert _max_tokens(spelling, body, replace(info, default_sampling={"max_tokens": 9})) == 9
