"""The terminal chat, piped, against a scripted server: history, errors, commands."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlserver_torch_stream import __version__, cli
from mlserver_torch_stream.cli.chat import Chat
from tests.cli.scripted import ScriptedServer, event, scripted_server


def _answer(*texts: str) -> list[bytes]:
    return [*map(event, texts), event("", finish="stop")]


def _chat(server: ScriptedServer, typed: str, *arguments: str) -> tuple[int, str]:
    process = subprocess.run(
        [sys.executable, "-m", "mlserver_torch_stream.cli", "chat", "--url", server.url, *arguments],
        input=typed,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        env={"PYTHONIOENCODING": "utf-8", "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    return process.returncode, process.stdout + process.stderr


def _messages(server: ScriptedServer, request: int) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = json.loads(server.asked[request]["inputs"][0]["data"][0])
    return messages


def test_the_conversation_goes_along_with_every_question() -> None:
    with scripted_server(_answer("Hal", "lo 🙂"), _answer("42")) as server:
        status, printed = _chat(server, "Hi\nHow many?\n", "--system", "Be brief.", "--max-tokens", "9")
    assert (status, printed) == (0, "Hallo 🙂\n42\n")
    assert _messages(server, 1) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hallo 🙂"},
        {"role": "user", "content": "How many?"},
    ]
    assert server.asked[0]["parameters"] == {"max_tokens": 9}


def test_exit_leaves_and_clear_forgets() -> None:
    with scripted_server(_answer("a"), _answer("b")) as server:
        status, _ = _chat(server, "one\n/clear\ntwo\n/exit\nthree\n")
    assert status == 0
    assert _messages(server, 1) == [{"role": "user", "content": "two"}]


def test_no_server_is_one_line_and_status_1() -> None:
    with scripted_server() as server:
        pass
    status, printed = _chat(server, "Hi\n")
    assert status == 1
    assert printed.startswith("error: no answer from http://127.0.0.1") and printed.count("\n") == 1


def test_several_models_have_to_be_chosen_from() -> None:
    with scripted_server(_answer("a"), models=("x", "y")) as server:
        assert _chat(server, "Hi\n") == (
            1,
            "error: the server has several models, choose one with --model: x, y\n",
        )
        assert _chat(server, "Hi\n", "--model", "y")[0] == 0
    assert server.asked[0]["path"] == "/v2/models/y/generate_stream"


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            written = super().write(text)
            if text == "one ":
                raise KeyboardInterrupt
            return written

    with scripted_server(_answer("one ", "two"), _answer("three")) as server:
        chat, sink = Chat(server.url, "m"), Interrupted()
        assert chat.turn("count", sink)
        assert chat.turn("go on", sink)
    assert sink.getvalue() == "one  [stopped]\nthree\n"
    assert _messages(server, 1)[1] == {"role": "assistant", "content": "one "}


def test_a_failed_question_is_not_kept() -> None:
    with scripted_server([b'{"error": "too long"}'], status=422) as server:
        chat = Chat(server.url, "m")
        assert not chat.turn("question", io.StringIO())
    assert chat.messages == []


def test_ctrl_c_while_modules_are_imported_is_one_line_and_status_130(tmp_path: Path) -> None:
    (tmp_path / "httpx.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for command in (["chat"], ["cloud", "run", "--input", str(tmp_path), "--url", "http://127.0.0.1:1"]):
        program = [sys.executable, "-m", "mlserver_torch_stream.cli", *command]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("typed", ["0", "-3", "x", "1.5"])
def test_a_number_that_is_none_is_told_what_it_must_be(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["chat", f"--max-tokens={typed}"])
    assert f"--max-tokens: must be a whole number, at least 1, got '{typed}'" in capsys.readouterr().err
