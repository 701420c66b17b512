"""What is accepted of OpenAI's bodies, and the field that a refusal names, is as it was recorded.

Each line of the record is one change of a valid body: its path, the body, the field (null: accepted), and whether the
refusal says "did you mean".
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_SPELLINGS
from mlserver_torch_stream.protocol.spelling import PostedBody
from mlserver_torch_stream.types import ModelInfo

_RECORD = Path(__file__).with_name("openai_refusals.jsonl")
_INFO = ModelInfo(
    vocab_size=100,
    max_model_len=64,
    max_num_seqs=4,
    has_chat_template=True,
    tool_parser="hermes",
    template_arguments=frozenset({"tools"}),
)


@pytest.mark.parametrize("path", OPENAI_SPELLINGS)
def test_a_refusal_names_the_field_that_it_has_named(path: str) -> None:
    found, recorded = [], []
    for line in _RECORD.read_text(encoding="utf-8").splitlines():
        endpoint, body, field, hint = json.loads(line)
        if path == f"/v1/{endpoint}":
            recorded.append((body, field, hint))
            found.append((body, *_refusal(path, body)))
    assert len(recorded) > 200
    assert [each for each in zip(recorded, found, strict=True) if each[0] != each[1]] == []


def _refusal(path: str, body: dict[str, object]) -> tuple[str | None, bool]:
    posted = PostedBody(body)
    try:
        OPENAI_SPELLINGS[path].decode(posted, _INFO, streaming=body.get("stream") is True, request_id="r")
    except InvalidInput as refusal:
        assert refusal.status == 422
        return refusal.field, "did you mean" in refusal.message
    return None, False
