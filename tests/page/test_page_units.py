"""The page's modules that need no browser, run by Node.js; and its code snippets, parsed as their languages."""

from __future__ import annotations

import ast
import json
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from mlserver_torch_stream.engine.api import EngineStats
from mlserver_torch_stream.server.observability.metrics import EngineMetrics, TokenMetrics
from mlserver_torch_stream.server.observability.request_observer import RequestMetrics
from mlserver_torch_stream.server.page import page_routes

_HERE = Path(__file__).parent
_NODE = shutil.which("node")
_NASTY = "It's \"q\" \\n $HOME `id` ''' é 🙂 </script>\n\t\u2028 end\\"
_BASE = "http://127.0.0.1:8080/behind/a/prefix/"

pytestmark = pytest.mark.skipif(_NODE is None, reason="there is no Node.js to run the page's modules")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("page")
    shutil.copytree(Path(page_routes.__file__).parent / "files", made / "files")
    (made / "package.json").write_text('{"type": "module"}')
    for script in _HERE.glob("*.mjs"):
        shutil.copy(script, made)
    return made


def _node(folder: Path, *arguments: str, given: str = "") -> str:
    command = [str(_NODE), *arguments]
    done = subprocess.run(command, cwd=folder, input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    return done.stdout


def test_the_modules_do_what_their_properties_say(folder: Path) -> None:
    metrics, registry = EngineMetrics(), CollectorRegistry()
    registry.register(TokenMetrics(metrics, RequestMetrics()))
    metrics.add(
        "a", None, lambda: EngineStats(running_sequences=4, waiting_requests=3, generation_tokens=50), "kernels"
    )
    metrics.add('b"}', "v1", lambda: EngineStats(running_sequences=1, generation_tokens=20), "torch")
    (folder / "metrics.txt").write_bytes(generate_latest(registry))
    assert "# pass 13\n" in _node(folder, "--test-reporter=tap", "units.mjs")


def _snippets(folder: Path, request: Mapping[str, Any], keyed: bool) -> dict[str, str]:
    written: dict[str, str] = json.loads(_node(folder, "snippets.mjs", given=json.dumps([request, _BASE, keyed])))
    return written


_BODIES = {
    "v1/chat/completions": {"messages": [{"role": "user", "content": _NASTY}], "seed": 3, "top_k": 5},
    "v1/completions": {"prompt": _NASTY, "stop": [_NASTY], "temperature": 0.5, "min_p": None},
}


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("path", list(_BODIES))
def test_a_snippet_sends_the_request_whatever_its_text_is(folder: Path, path: str, keyed: bool) -> None:
    body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, **_BODIES[path]}
    snippets = _snippets(folder, {"path": path, "body": body}, keyed)
    words = shlex.split(snippets["curl"])
    assert words[:3] == ["curl", "-N", _BASE + path] and json.loads(words[-1]) == body

    strings = [node.value for node in ast.walk(ast.parse(snippets["Python"])) if isinstance(node, ast.Constant)]
    assert body in [json.loads(text) for text in strings if isinstance(text, str) and text.startswith('{"model"')]
    assert _BASE + path in strings

    calls = [node for node in ast.walk(ast.parse(snippets["openai SDK"])) if isinstance(node, ast.Call)]
    (asked,) = [call for call in calls if any(each.arg == "model" for each in call.keywords)]
    given = {str(each.arg): ast.literal_eval(each.value) for each in asked.keywords}
    assert given | given.pop("extra_body", {}) == body
    for kind, text in snippets.items():
        assert ("KEY" in text) == keyed, kind
