"""The terminal chat, piped, with a scripted server: history, errors, commands, and how answers are shown."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from mlserver_torch_stream import __version__, cli, client
from mlserver_torch_stream.cli.chat import AnswerMeter, AnswerView, Chat
from mlserver_torch_stream.client import Delta, RequestUsage, ToolCallDelta
from tests.cli.scripted import ScriptedServer, event, scripted_server


def _answer(*texts: str) -> list[bytes]:
    return [*map(event, texts), event("", finish="stop")]


def _chat(server: ScriptedServer, typed: str, *arguments: str, key: str | None = None) -> tuple[int, str]:
    environment = {"PYTHONIOENCODING": "utf-8", "PYTHONPATH": ":".join(filter(None, sys.path))}
    process = subprocess.run(
        [sys.executable, "-m", "mlserver_torch_stream.cli", "chat", "--url", server.url, *arguments],
        input=typed,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        env=environment if key is None else {**environment, "OPENAI_API_KEY": key},
    )
    return process.returncode, process.stdout + process.stderr


def _started(server: ScriptedServer, stdout: IO[bytes] | int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlserver_torch_stream.cli", "chat", "--url", server.url]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE)


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
    assert server.asked[0]["parameters"] == {"max_tokens": 9, "return_token_ids": True}


def test_exit_leaves_and_clear_forgets() -> None:
    with scripted_server(_answer("a"), _answer("b")) as server:
        status, _ = _chat(server, "one\n/clear\ntwo\n/exit\nthree\n")
    assert status == 0
    assert _messages(server, 1) == [{"role": "user", "content": "two"}]


def test_a_system_message_is_set_and_taken_back_within_a_conversation() -> None:
    with scripted_server(_answer("a"), _answer("b"), _answer("c")) as server:
        _chat(server, "one\n/system Be brief.\ntwo\n/system\nthree\n")
    roles = [[message["role"] for message in _messages(server, request)] for request in range(3)]
    assert roles[1] == ["system", *roles[2][:3]] and roles[2] == ["user", "assistant", "user", "assistant", "user"]
    assert _messages(server, 1)[0]["content"] == "Be brief."


def test_a_mistyped_command_is_no_question_and_a_path_is_one() -> None:
    with scripted_server(_answer("a")) as server:
        status, printed = _chat(server, "/etc/hosts has what in it?\n/claer\n")
    assert (status, printed) == (1, "a\nerror: /claer: unknown command; did you mean /clear?\n")
    assert len(server.asked) == 1


def test_another_protocol_is_refused_with_what_speaks_it() -> None:
    with scripted_server() as server:
        status, printed = _chat(server, "Hi\n", "--api", "openai")
    assert (status, printed) == (1, "error: api: must be v2, got 'openai'; for OpenAI's API use the openai package\n")


def test_the_key_of_the_environment_is_not_sent_and_that_of_a_file_is_never_printed(tmp_path: Path) -> None:
    with scripted_server(_answer("a")) as server:
        _chat(server, "Hi\n", key="sk-secret")
        assert "Authorization" not in server.headers[-1]
    (tmp_path / "key").write_text("sk-of-a-file\n")
    body = b'{"error": "sk-of-a-file is no key"}'
    with scripted_server([body], status=401) as server:
        status, printed = _chat(server, "Hi\n", "--model", "m", "--api-key-file", str(tmp_path / "key"))
        assert server.headers[-1]["Authorization"] == "Bearer sk-of-a-file"
    assert (status, printed) == (1, "\nerror: the server answered 401: *** is no key\n")


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://localhost", "grpc://localhost", "http://[::1"])
def test_a_url_that_cannot_be_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", url]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1


def test_no_server_is_one_line_and_status_1() -> None:
    with scripted_server() as server:
        pass
    status, printed = _chat(server, "Hi\n")
    assert status == 1
    assert printed.startswith("error: no server at http://127.0.0.1") and printed.count("\n") == 1


@pytest.mark.long
def test_several_models_have_to_be_chosen_from() -> None:
    with scripted_server(_answer("a"), models=("x", "y")) as server:
        assert _chat(server, "Hi\n") == (
            1,
            "error: the server has several models; choose one with --model: x, y\n",
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

    with (
        scripted_server(_answer("one ", "two"), _answer("three")) as server,
        client.Client(server.url) as asked,
    ):
        chat, sink = Chat(asked, "m"), Interrupted()
        assert chat.turn("count", sink, interactive=True)
        assert chat.turn("go on", sink)
    shown = sink.getvalue().splitlines()
    assert shown[0] == "one  [stopped]" and shown[2:] == ["three"]
    assert _messages(server, 1)[1] == {"role": "assistant", "content": "one "}


def test_a_failed_question_is_not_kept() -> None:
    with scripted_server([b'{"error": "too long"}'], status=422) as server, client.Client(server.url) as asked:
        chat = Chat(asked, "m")
        assert not chat.turn("question", io.StringIO())
    assert chat.messages == []


def test_a_refusal_of_many_lines_is_one_line() -> None:
    page = b"<html>\n<body>\n" + b"Bad gateway\n" * 200
    with scripted_server([page], status=502) as server:
        status, printed = _chat(server, "Hi\n", "--model", "m")
    assert status == 1
    assert printed.startswith("\nerror: the server answered 502: <html> <body> Bad gateway")
    assert printed.count("\n") == 2 and len(printed) < 600


def test_what_a_server_says_steers_no_terminal() -> None:
    with scripted_server([b"\x1b]0;owned\x07\xc2\x9b2J\xe2\x80\xaego"], status=502) as server:
        status, printed = _chat(server, "Hi\n", "--model", "m")
    assert (status, printed) == (1, "\nerror: the server answered 502: \\x1b]0;owned\\x07\\x9b2J\\u202ego\n")


def test_ctrl_c_just_behind_an_answer_leaves_the_conversation_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keyboard(io.StringIO):
        def isatty(self) -> bool:
            return True

    class Screen(Keyboard):
        def write(self, text: str) -> int:
            if text.startswith("\x1b[2m") and "interrupted" not in self.getvalue():
                super().write("interrupted")
                raise KeyboardInterrupt
            return super().write(text)

    typed = iter(["one", "two", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    with scripted_server(_answer("1"), _answer("2")) as server, client.Client(server.url) as asked:
        screen = Screen()
        assert Chat(asked, "m").run(Keyboard(), screen, "m") == 0
    assert "interrupted\n2\n" in screen.getvalue()
    assert [message["content"] for message in _messages(server, 1)] == ["one", "1", "two"]


def test_ctrl_c_ends_a_file_of_questions() -> None:
    with scripted_server([event("one ")], _answer("two"), hold=True) as server, _started(server) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"first\nsecond\n")
        process.stdin.flush()
        assert process.stdout.read(4) == b"one "
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed, errors) == (130, b"", b"interrupted\n")
    assert len(server.asked) == 1


def test_a_full_disk_is_one_line() -> None:
    with (
        scripted_server(_answer("one")) as server,
        Path("/dev/full").open("wb") as full,
        _started(server, stdout=full) as process,
    ):
        errors = process.communicate(b"Hi\n", timeout=60)[1]
    assert process.returncode == 1
    assert errors.decode().startswith("error: ") and errors.count(b"\n") == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-"])
def test_a_closed_input_or_output_is_one_line(closed: str) -> None:
    program = f"{sys.executable} -m mlserver_torch_stream.cli chat --url http://127.0.0.1:1 {closed}"
    done = subprocess.run(program, shell=True, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: standard input and output must be open\n")


def test_a_reader_that_closes_its_end_is_no_traceback() -> None:
    with scripted_server(_answer("one")) as server, _started(server) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.communicate(b"Hi\n", timeout=60)[1] == b""
    assert process.returncode == 1


@pytest.mark.long
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


def _summary(*deltas: tuple[float, Delta]) -> str:
    meter = AnswerMeter(100.0)
    for now, delta in deltas:
        meter.add(delta, now)
    return meter.summary()


def test_the_servers_count_beats_the_number_of_events() -> None:
    usage = RequestUsage(5, 21)
    assert _summary((100.5, Delta("a")), (102.5, Delta("b", usage=usage, final=True))) == (
        "21 tokens, 10.0 tokens/s, first token after 0.50 s"
    )


def test_tokens_that_come_with_the_first_are_no_pace() -> None:
    """A reader that lags gets several first tokens in one event, which says nothing about the speed."""
    assert _summary((101, Delta("abc", token_ids=(1, 2, 3))), (103, Delta("d", token_ids=(4,)))) == (
        "4 tokens, 0.5 tokens/s, first token after 1.00 s"
    )
    assert _summary((101, Delta("abc", token_ids=(1, 2, 3)))) == "3 tokens, first token after 1.00 s"


def test_an_answer_that_nobody_counts_is_estimated_by_its_events() -> None:
    assert _summary((101, Delta("a")), (102, Delta("b")), (103, Delta("c"))) == (
        "~3 tokens, 1.0 tokens/s, first token after 1.00 s"
    )


def test_an_event_without_token_and_text_is_no_first_token() -> None:
    last = Delta("a", usage=RequestUsage(1, 1), final=True)
    assert _summary((101, Delta()), (104, last)) == "1 token, first token after 4.00 s"


def test_a_token_whose_text_is_held_back_is_the_first() -> None:
    assert _summary((101, Delta(token_ids=(7,))), (104, Delta("a", token_ids=(8,)))) == (
        "2 tokens, 0.3 tokens/s, first token after 1.00 s"
    )


def test_an_answer_without_a_token_has_no_line() -> None:
    assert _summary((101, Delta(final=True))) == ""


_DELTAS = [
    Delta(reasoning="Hm"),
    Delta(reasoning=".\x1b[31m"),
    Delta("Wait"),
    Delta("."),
    Delta(tool_calls=(ToolCallDelta(0, "a", "look"), ToolCallDelta(0, arguments='{"at": '))),
    Delta(tool_calls=(ToolCallDelta(0, arguments='"x"}'), ToolCallDelta(1, "b", "go", "{}"))),
]


def _shown(deltas: list[Delta], *, styled: bool) -> str:
    sink = io.StringIO()
    view = AnswerView(sink, styled=styled)
    for delta in deltas:
        view.add(delta)
    view.end()
    return sink.getvalue()


def test_reasoning_and_calls_are_dimmed_and_the_text_is_not() -> None:
    assert _shown(_DELTAS, styled=True) == (
        "\x1b[2mHm.[31m\x1b[0m\nWait.\n" + '\x1b[2mlook({"at": "x"})\x1b[0m\n\x1b[2mgo({})\x1b[0m'
    )


def test_an_answer_that_is_stopped_leaves_no_style() -> None:
    for count in range(len(_DELTAS)):
        shown = _shown(_DELTAS[: count + 1], styled=True)
        assert shown.count("\x1b[2m") == shown.count("\x1b[0m")


def test_where_there_is_no_terminal_the_text_is_alone() -> None:
    assert _shown(_DELTAS, styled=False) == "Wait."
