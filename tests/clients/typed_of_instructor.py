"""Answers in pydantic's classes with instructor, by a JSON schema and by a forced call, the third of three turns.

Knows nothing of the server beyond its address. A random model answers; grammars give its answers the required form.
instructor sends an answer that its class refuses back, with the error, and asks again.
"""

from __future__ import annotations

import sys
from typing import Any

import instructor
import openai
import pydantic
from typed_answers import Look

_ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "seed": 4, "max_retries": 2}
_RESULT_ROLES = {instructor.Mode.JSON_SCHEMA: "user", instructor.Mode.TOOLS_STRICT: "tool"}


def main(url: str) -> None:
    for mode, role in _RESULT_ROLES.items():
        turns: list[list[str]] = []

        def note(*_: Any, turns: list[list[str]] = turns, **sent: Any) -> None:
            turns.append([message["role"] for message in sent["messages"]])

        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
        client.on("completion:kwargs", note)
        said = [{"role": "user", "content": "Where is it?"}]
        answer = client.chat.completions.create(messages=said, response_model=_third_look(), **_ASKED)
        assert isinstance(answer, Look), mode
        assert len(turns) == 3 and turns[-1] == ["user", *(2 * ["assistant", role])], turns


def _third_look() -> type[Look]:
    """Returns a class that refuses its first two answers."""
    looks: list[Look] = []

    class ThirdLook(Look):
        @pydantic.model_validator(mode="after")
        def is_third(self) -> ThirdLook:
            looks.append(self)
            if len(looks) < 3:
                raise ValueError("look again")
            return self

    return ThirdLook


main(sys.argv[1])
