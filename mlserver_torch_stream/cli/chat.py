"""Chats in a terminal: reads lines, shows answers as they stream, and keeps the conversation."""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TextIO

from mlserver_torch_stream import client
from mlserver_torch_stream.cli.argument_types import key_in_file, positive, without_key
from mlserver_torch_stream.client import Delta, ToolCallDelta
from mlserver_torch_stream.client.address import without_credentials
from mlserver_torch_stream.did_you_mean import did_you_mean_or_known
from mlserver_torch_stream.log_text import log_text


class AnswerMeter:
    """Measures one answer's tokens per second and its time to the first token. Times are in seconds; any clock can be
    used.

    A delta without token ids counts as one token. If the server sends no token count at the end, the sum is shown as an
    estimate.
    """

    def __init__(self, now: float) -> None:
        self._asked = now
        self._first = self._last = now
        self._first_tokens = 0  # tokens of the first delta, which may have several
        self._tokens = 0
        self._estimated = False

    def add(self, delta: Delta, now: float) -> None:
        """Counts the tokens of a delta that arrived at the time ``now``."""
        if delta.text or delta.reasoning or delta.tool_calls or delta.token_ids:
            count = len(delta.token_ids) or 1
            if not self._tokens:
                self._first, self._first_tokens = now, count
            self._last = now
            self._tokens += count
            self._estimated = self._estimated or not delta.token_ids
        if delta.usage is not None:
            self._tokens, self._estimated = delta.usage.completion_tokens, False

    def summary(self) -> str:
        """Returns the measurements in one line, or an empty string if there was no token."""
        if not self._tokens:
            return ""
        parts = [f"{'~' if self._estimated else ''}{self._tokens} token{'' if self._tokens == 1 else 's'}"]
        later, seconds = self._tokens - self._first_tokens, self._last - self._first
        if later > 0 and seconds > 0:
            parts.append(f"{later / seconds:.1f} tokens/s")
        return ", ".join([*parts, f"first token after {self._first - self._asked:.2f} s"])


DIM, PLAIN = "\x1b[2m", "\x1b[0m"
_CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class AnswerView:
    """Shows an answer as it streams. Unless ``styled``, shows only the text of the answer, as the model wrote it."""

    def __init__(self, sink: TextIO, *, styled: bool) -> None:
        self._sink = sink
        self._styled = styled
        self._dim = False
        self._last: bool | None = None  # whether the text that was shown last is dimmed
        self._call: int | None = None  # the index of the tool call that is being shown

    def add(self, delta: Delta) -> None:
        """Shows a delta."""
        if not self._styled:
            self._sink.write(delta.text)
            return
        self._show(delta.reasoning, dim=True)
        self._show(delta.text, dim=False)
        for call in delta.tool_calls:
            self._show_call(call)

    def end(self) -> None:
        """Resets the terminal's style, even after an answer that was stopped."""
        if self._call is not None:
            self._sink.write(")")
        if self._dim:
            self._sink.write(PLAIN)
        self._dim, self._call = False, None

    def _show_call(self, call: ToolCallDelta) -> None:
        if call.index != self._call:
            self.end()
            self._call = call.index
            self._show(f"{call.name}(", dim=True, apart=True)
        self._show(call.arguments, dim=True)

    def _show(self, text: str, *, dim: bool, apart: bool = False) -> None:
        """Shows a text. It begins on a new line with ``apart``, or after a change between reasoning and answer."""
        if not text:
            return
        if not dim:
            self.end()
        if apart or dim != self._last:
            self._sink.write("" if self._last is None else "\n")
        if dim and not self._dim:
            self._sink.write(DIM)
        self._dim = self._last = dim
        self._sink.write(visible(text))


def visible(text: str) -> str:
    """Returns the text without control characters, which a terminal would interpret."""
    return text.translate(_CONTROL)


DEFAULT_URL = "http://127.0.0.1:8080"
_MAX_TOKENS = 512
_PROMPT = "you> "
_COMMANDS = ("/clear", "/system", "/quit", "/exit")
_MAX_ERROR_CHARACTERS = 500


def main(argv: Sequence[str]) -> int:
    """Lets the user chat with a model in the terminal until the input ends, and returns the exit status."""
    arguments = _parser().parse_args(argv)
    if None in (sys.stdin, sys.stdout):  # Python sets closed streams to None
        _complain("standard input and output must be open")
        return 1
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # characters that the terminal lacks become ?
    key = None
    try:
        key = key_in_file(arguments.api_key_file) if arguments.api_key_file else None
        with client.Client(arguments.url, api=arguments.api, api_key=key, ca_file=arguments.ca_file) as server:
            model = arguments.model or _choose_model(server, arguments.url, sys.stdin, sys.stdout)
            chat = Chat(server, model, _parameters(arguments), arguments.system, key)
            return chat.run(sys.stdin, sys.stdout, log_text(f"{model} at {without_credentials(arguments.url)}"))
    except (client.ClientError, ValueError) as error:
        _complain(error, key)
    except BrokenPipeError:
        sys.stdout = None  # its reader has closed it, so a flush at exit would fail
    except OSError as error:  # such as a full disk
        sys.stdout = None
        _complain(error)
    return 1


@dataclass
class Chat:
    """One conversation: its messages so far, without the system message, and the parameters of its requests."""

    server: client.Client
    model: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    key: str | None = None  # removed from everything that is printed
    messages: list[dict[str, str]] = field(default_factory=list)

    def run(self, source: TextIO, sink: TextIO, title: str) -> int:
        """Answers lines until ``source`` ends.

        Returns the exit status, which is 1 if a line of a file or pipe failed.
        """
        interactive = source.isatty() and sink.isatty()
        if interactive:
            with suppress(ImportError):
                import_module("readline")  # gives ``input`` an editor and a history
            print(f"{title}. Ctrl-C stops an answer; /clear, /system TEXT, /quit.", file=sink)
        while (line := _read_line(source, sink, interactive)) not in (None, "/quit", "/exit"):
            assert line is not None
            try:
                if line and not self._answer(line, sink, interactive) and not interactive:
                    return 1
            except KeyboardInterrupt:  # between the prompt and the answer
                if not interactive:
                    raise
                print(file=sink)
        return 0

    def _answer(self, line: str, sink: TextIO, interactive: bool) -> bool:
        """Runs a command, or asks the model. Returns False if this failed; the reason is printed."""
        command, _, rest = line.partition(" ")
        if command == "/clear":
            self.messages.clear()
        elif command == "/system":
            self.system = rest.strip() or None
        elif command[:1] == "/" and command[1:].isalpha():  # a path such as /etc/hosts is a question
            _complain(f"{command}: unknown command{did_you_mean_or_known(command, _COMMANDS, str)}")
            return False
        else:
            return self.turn(line, sink, interactive)
        return True

    def turn(self, line: str, sink: TextIO, interactive: bool = False) -> bool:
        """Streams the answer to one line and keeps the answer's text, even if the answer is stopped. Returns False if
        it failed.
        """
        said: list[str] = []
        meter = AnswerMeter(time.monotonic())
        error: client.ClientError | None = None
        try:
            self.messages.append({"role": "user", "content": line})
            self._stream(said, meter, sink, interactive)
        except KeyboardInterrupt:
            if not interactive:
                raise  # the further questions of a file or pipe are not asked either
            sink.write(" [stopped]")
        except client.ClientError as failure:
            error = failure
        if answer := "".join(said):
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages.pop()
        sink.write("\n")
        if interactive and (summary := meter.summary()):
            sink.write(f"{DIM}{summary}{PLAIN}\n")
        sink.flush()
        if error:
            _complain(error, self.key)
        return error is None

    def _stream(self, said: list[str], meter: AnswerMeter, sink: TextIO, interactive: bool) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        deltas = self.server.stream(self.model, messages=[*system, *self.messages], **self.parameters)
        view = AnswerView(sink, styled=interactive)
        with closing(deltas):
            try:
                for delta in deltas:
                    meter.add(delta, time.monotonic())
                    said.append(delta.text)
                    view.add(delta)
                    sink.flush()
            finally:
                view.end()


def _parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    said = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature, "seed": arguments.seed}
    return {**said, "return_token_ids": True}  # counted for the speed, as a stopped answer has no usage


def _choose_model(server: client.Client, url: str, source: TextIO, sink: TextIO) -> str:
    """Returns the server's only model, or the one that the user chooses from several.

    Raises ClientError if the server has no model, or has several and nobody can be asked.
    """
    names = server.models()
    if len(names) == 1:
        return names[0]
    if not names:
        raise client.ClientError(f"the server at {without_credentials(url)} has no model that is ready")
    if source.isatty() and sink.isatty():
        return _asked_model(names, source, sink)
    raise client.ClientError(f"the server has several models; choose one with --model: {', '.join(names)}")


def _asked_model(names: Sequence[str], source: TextIO, sink: TextIO) -> str:
    """Asks until the user types a name or a number in the list. Raises ClientError at the end of input."""
    for number, name in enumerate(names, 1):
        print(f"{number}  {log_text(name)}", file=sink)
    while (line := _read_line(source, sink, True, "model> ")) is not None:
        if line in names:
            return line
        if line.isdecimal() and 1 <= int(line[:9]) <= len(names):
            return names[int(line[:9]) - 1]
        print("Type a number or a name from the list.", file=sink)
    raise client.ClientError(f"the server has several models; choose one with --model: {', '.join(names)}")


def _read_line(source: TextIO, sink: TextIO, interactive: bool, prompt: str = _PROMPT) -> str | None:
    """Returns the next line, stripped; None at the end of input, or if Ctrl-C is typed at the prompt."""
    if not interactive:
        line = source.readline()
        return line.strip() if line else None
    try:
        return input(prompt).strip()
    except (EOFError, KeyboardInterrupt):
        print(file=sink)
        return None


def _complain(error: object, key: str | None = None) -> None:
    """Prints an error in one line, without the API key."""
    text = " ".join(without_key(str(error), key).split())[:_MAX_ERROR_CHARACTERS]
    print(f"error: {log_text(text)}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlserver-torch-stream chat",
        description="Chat in the terminal. Ctrl-C stops an answer; at the prompt it leaves. /clear forgets "
        "the conversation, /system TEXT sets a system message, /quit leaves.",
    )
    parser.add_argument(
        "--url", default=DEFAULT_URL, help="the server, http(s)://… or, for gRPC, grpc(s)://… (default: %(default)s)"
    )
    parser.add_argument("--api", default="v2", help="the protocol of --url; only v2 is implemented (default: v2)")
    parser.add_argument("--api-key-file", metavar="FILE", help="a file whose first line is the API key to send")
    parser.add_argument("--ca-file", metavar="FILE", help="PEM certificates of the authorities to trust")
    parser.add_argument("--model", help="the model's name (default: the server's only model, or a choice)")
    parser.add_argument("--system", help="a system message that starts the conversation")
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=_MAX_TOKENS,
        help="the maximum number of tokens of an answer (default: %(default)s)",
    )
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the model's own)")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer")
    return parser
