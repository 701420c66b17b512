"""Chats in a terminal: reads lines, streams answers, keeps the conversation.

Knows the client only, and neither models nor servers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TextIO

from mlserver_torch_stream import client
from mlserver_torch_stream.cli.argument_types import positive

DEFAULT_URL = "http://127.0.0.1:8080"
_PROMPT = "you> "
_EXIT = ("/exit", "/quit")


def main(argv: Sequence[str]) -> int:
    return Chat.from_arguments(_parser().parse_args(argv)).run(sys.stdin, sys.stdout)


@dataclass
class Chat:
    """One conversation: its messages so far, and the parameters of its requests."""

    url: str
    model: str | None = None
    system: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Chat:
        wanted = {name: getattr(arguments, name) for name in ("max_tokens", "temperature", "seed")}
        parameters = {name: value for name, value in wanted.items() if value is not None}
        return cls(arguments.url, arguments.model, arguments.system, parameters)

    def run(self, source: TextIO, sink: TextIO) -> int:
        """Answers lines until ``source`` ends. The exit status is 1 if a request failed."""
        self.clear()
        try:
            self.model = self.model or _only_model(self.url)
        except client.ClientError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        interactive = source.isatty()
        if interactive:
            print(f"{self.model} at {self.url}. Ctrl-C stops an answer, /exit leaves.", file=sink)
        while (line := _read_line(source, sink, interactive)) is not None:
            if line in _EXIT:
                break
            if line == "/clear":
                self.clear()
            elif line and not self.turn(line, sink) and not interactive:
                return 1
        return 0

    def clear(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def turn(self, line: str, sink: TextIO) -> bool:
        """Streams the answer to one line, and keeps its text, also of an answer that was stopped."""
        self.messages.append({"role": "user", "content": line})
        said: list[str] = []
        error: client.ClientError | None = None
        try:
            self._stream(said, sink)
        except KeyboardInterrupt:
            sink.write(" [stopped]")
        except client.ClientError as failure:
            error = failure
        sink.write("\n")
        sink.flush()
        if answer := "".join(said):
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages.pop()
        if error:
            print(f"error: {error}", file=sys.stderr)
        return error is None

    def _stream(self, said: list[str], sink: TextIO) -> None:
        assert self.model is not None
        deltas = client.stream(self.url, self.model, messages=self.messages, **self.parameters)
        with closing(deltas):
            for delta in deltas:
                said.append(delta.text)
                sink.write(delta.text)
                sink.flush()


def _only_model(url: str) -> str:
    names = client.model_names(url)
    if len(names) == 1:
        return names[0]
    if not names:
        raise client.ClientError(f"the server at {url} has no model ready")
    raise client.ClientError(f"the server has several models, choose one with --model: {', '.join(names)}")


def _read_line(source: TextIO, sink: TextIO, interactive: bool) -> str | None:
    """The next line without surrounding blanks, None at the end of input. Ctrl-C at the prompt starts a new line."""
    if not interactive:
        line = source.readline()
        return line.strip() if line else None
    try:
        return input(_PROMPT).strip()
    except EOFError:
        print(file=sink)
        return None
    except KeyboardInterrupt:
        print("\n(/exit or Ctrl-D leaves)", file=sink)
        return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlserver-torch-stream chat",
        description="Chat in the terminal. Ctrl-C stops an answer; /exit or Ctrl-D leaves; /clear forgets.",
    )
    parser.add_argument("--url", default=DEFAULT_URL, help="the server's REST address (default: %(default)s)")
    parser.add_argument("--model", help="model name (default: the server's only model)")
    parser.add_argument("--system", help="a system message that starts the conversation")
    parser.add_argument("--max-tokens", type=positive, default=512, help="longest answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the model's own)")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer")
    return parser
