"""The chat in a terminal with a real server: what is shown below an answer, history, Ctrl-C."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlserver_torch_stream import client
from mlserver_torch_stream.cli.chat import visible
from tests.server.harness import Server
from tests.server.terminal import CTRL_C, CTRL_D, Terminal, terminal

# There is no pace where all tokens come at once, as on a busy machine.
_SUMMARY = re.compile(r"\x1b\[2m~?(\d+) tokens?, (?:[\d.]+ tokens/s, )?first token after [\d.]+ s\x1b\[0m\n")
_PROMPT = "you> "


@contextmanager
def _chat(*arguments: str) -> Iterator[Terminal]:
    program = ["-m", "mlserver_torch_stream.cli", "chat", "--model", "tiny", *arguments]
    with terminal(program, {}) as opened:
        opened.wait_for(_PROMPT)
        yield opened


def _transport(server: Server, name: str) -> list[str]:
    """Returns the chat's options for the transport."""
    return ["--url", f"grpc://{server.grpc_target}" if name == "grpc" else server.url]


def _answer(shown: Terminal, question: str) -> tuple[str, int]:
    """Returns the answer's text, and the number of tokens in the line below it."""
    asked = len(shown.shown)
    shown.type(f"{question}\n")
    begin = shown.wait_for(f"{question}\n", asked)
    end = shown.wait_for("\x1b[0m\n", begin)
    shown.wait_for(_PROMPT, end)
    summary = _SUMMARY.search(shown.shown, begin)
    assert summary, shown.shown[begin:]
    return shown.shown[begin : summary.start()].removesuffix("\n"), int(summary[1])


def test_of_several_models_one_is_typed(server: Server) -> None:
    program = ["-m", "mlserver_torch_stream.cli", "chat", "--url", server.url, "--max-tokens", "2"]
    with terminal(program, {}) as shown:
        listed = shown.wait_for("model> ")
        number = re.search(r"(\d+)  tiny\n", shown.shown)
        assert number is not None and "other\n" in shown.shown
        shown.type("nobody\n")
        again = shown.wait_for("Type a number or a name from the list.", listed)
        shown.wait_for("model> ", again)
        shown.type(f"{number[1]}\n")
        shown.wait_for("tiny at http", again)
        shown.wait_for(_PROMPT, again)
        shown.type("/quit\n")
        assert shown.wait_for_end() == 0


@pytest.mark.long
@pytest.mark.parametrize("transport", ["rest", "grpc"])
def test_the_second_answer_knows_the_first_and_the_line_below_tells_its_tokens(server: Server, transport: str) -> None:
    with _chat(*_transport(server, transport), "--max-tokens", "12") as shown:
        first, tokens = _answer(shown, "Hello")
        second, _ = _answer(shown, "fox")
        shown.type("/quit\n")
        assert shown.wait_for_end() == 0
    assert tokens == 12
    conversation = [{"role": "user", "content": "Hello"}]
    said = "".join(map(str, client.stream(server.url, "tiny", messages=conversation, max_tokens=12)))
    conversation += [{"role": "assistant", "content": said}, {"role": "user", "content": "fox"}]
    expected = "".join(map(str, client.stream(server.url, "tiny", messages=conversation, max_tokens=12)))
    assert (first, second) == (visible(said), visible(expected))
    forgotten = client.stream(server.url, "tiny", messages=conversation[-1:], max_tokens=12)
    assert visible("".join(map(str, forgotten))) != second


@pytest.mark.long
@pytest.mark.parametrize("transport", ["rest", "grpc"])
def test_ctrl_c_stops_the_answer_and_frees_its_row_and_the_chat_goes_on(slow: Server, transport: str) -> None:
    before = slow.wait_for("tiny", lambda now: now["running_sequences"] == 0)
    with _chat(*_transport(slow, transport), "--max-tokens", "900") as shown:
        shown.type("Hello\n")
        slow.wait_for("tiny", lambda now: now["generation_tokens"] - before["generation_tokens"] > 3)
        shown.type(CTRL_C)
        stopped = shown.wait_for(" [stopped]\n")
        after = slow.wait_for("tiny", lambda now: now["cancelled_sequences"] == before["cancelled_sequences"] + 1)
        assert after["running_sequences"] == 0
        shown.wait_for(_PROMPT, stopped)
        assert _SUMMARY.match(shown.shown, stopped)
        shown.type(CTRL_C)
        assert shown.wait_for_end() == 0
    assert "Traceback" not in shown.shown


def test_ctrl_d_leaves_and_a_refusal_does_not(server: Server) -> None:
    with _chat("--url", server.url, "--temperature", "-1") as shown:
        shown.type("Hello\n")
        refused = shown.wait_for("error: the server answered 422: ")
        shown.wait_for(_PROMPT, refused)
        assert "temperature" in shown.shown[refused:]
        shown.type(CTRL_D)
        assert shown.wait_for_end() == 0
