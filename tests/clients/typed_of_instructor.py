"""Answers in pydantic's classes with instructor, by a JSON schema and by a forced call.

Knows nothing of the server beyond its address. A random model answers; grammars give its answers the required form.
"""

from __future__ import annotations

import sys

import instructor
import openai
from typed_answers import Look


def main(url: str) -> None:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
        answer = client.chat.completions.create(
            model="tiny",
            response_model=Look,
            messages=[{"role": "user", "content": "Where is it?"}],
            max_tokens=300,
            seed=4,
            max_retries=1,
        )
        assert isinstance(answer, Look), mode


main(sys.argv[1])
