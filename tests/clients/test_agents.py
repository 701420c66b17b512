"""Tool loops and typed answers of clients' own helpers on a real server: the openai SDK, Anthropic's, LiteLLM,
LangChain, pydantic-ai."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.environments import make_environment
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, serve

_HERE = Path(__file__).parent
_RUN_S = 300
_TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %} {{ call.function.arguments.place }}{% endfor %}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def tools(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = Model("tiny", str(tiny_model), extra={"chat_template": _TEMPLATE})
    with serve(tmp_path_factory.mktemp("agents") / "models", [model], settings=QUIET) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "scripts"),
    [
        ("anthropic", ("tools_of_anthropic",)),
        ("litellm-mcp", ("tools_of_litellm",)),
        ("openai", ("tools_of_openai", "responses_of_openai")),
        ("langchain-openai", ("agents_of_langchain",)),
        ("pydantic-ai", ("agents_of_pydantic_ai",)),
    ],
)
def test_tool_loops_and_typed_answers(
    environment: str, scripts: tuple[str, ...], tools: Server, tmp_path: Path
) -> None:
    python = make_environment(tmp_path, environment)
    for script in scripts:
        command = [str(python), str(_HERE / f"{script}.py"), tools.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
