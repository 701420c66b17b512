"""The ``mlserver-torch-stream`` command: parses what was typed and hands it to the subcommand.

Knows no subcommand's inside: each is imported when it is chosen, so that ``--help`` costs nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mlserver_torch_stream import __version__

DEFAULT_URL = "http://127.0.0.1:8080"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    from mlserver_torch_stream.cli.chat import Chat

    return Chat.from_arguments(arguments).run(sys.stdin, sys.stdout)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlserver-torch-stream", description="Talk to a model that mlserver-torch-stream serves."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    _add_chat(commands.add_parser("chat", help="chat in the terminal; answers appear token by token"))
    return parser


def _add_chat(chat: argparse.ArgumentParser) -> None:
    chat.description = "Chat in the terminal. Ctrl-C stops an answer; /exit or Ctrl-D leaves; /clear forgets."
    chat.add_argument("--url", default=DEFAULT_URL, help="the server's REST address (default: %(default)s)")
    chat.add_argument("--model", help="model name (default: the server's only model)")
    chat.add_argument("--system", help="a system message that starts the conversation")
    chat.add_argument("--max-tokens", type=_positive, default=512, help="longest answer (default: %(default)s)")
    chat.add_argument("--temperature", type=float, help="0 is greedy (default: the model's own)")
    chat.add_argument("--seed", type=int, help="the same seed gives the same answer")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
