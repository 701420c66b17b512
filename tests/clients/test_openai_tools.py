"""The openai SDK calls tools of a real server: three turns, the events of a stream, arguments as pydantic has them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.clients.environments import make_environment
from tests.server.conftest import QUIET
from tests.server.harness import Model, serve

_SCRIPT = Path(__file__).with_name("with_openai_tools.py")
_TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %} {{ call.function.arguments.place }}{% endfor %}\n{% endfor %}"
)


@pytest.mark.slow
def test_a_tool_loop_of_the_openai_sdk(tiny_model: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path, "openai")
    model = Model("tiny", str(tiny_model), extra={"chat_template": _TEMPLATE})
    with serve(tmp_path / "models", [model], settings=QUIET) as server:
        command = [str(python), str(_SCRIPT), server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
