"""The ``mlserver-torch-stream`` command: passes the command line to a subcommand.

A subcommand's module is imported only when it is chosen, so that ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from mlserver_torch_stream.version import __version__

_INTERRUPTED = 130  # the exit status that shells show for SIGINT
# Subcommand -> its module in this folder, and its line in --help.
_COMMANDS = {
    "serve": ("serve", "serve a model or a folder of models, and print a request to copy"),
    "chat": ("chat", "chat in the terminal; answers appear token by token"),
    "cloud": ("cloud", "answer prompts from the objects of a bucket, a folder or a list of URLs"),
    "plan": ("plan", "compute how many streams of a model fit on a device, and how fast they can be"),
    "rank": ("rank", "run one rank of a tensor-parallel server; torchrun starts this command"),
    "serve-torchserve": ("serve_torchserve", "serve a TorchServe model store, as its config.properties says"),
    "torchserve": ("serve_torchserve", "the same, with the options of TorchServe's own command"),
    "import-mar": ("import_mar", "write a model folder for a TorchServe archive"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that ``argv`` names (default: the process's arguments) and returns its exit status."""
    typed = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(typed)
    try:
        command = import_module(f"{__name__}.{_COMMANDS[arguments.command][0]}")
        status: int = command.main(typed[typed.index(arguments.command) + 1 :])
    except KeyboardInterrupt:  # during the imports, which take seconds, before the command handles signals
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except ModuleNotFoundError as error:  # in the environment of a server of vLLM's models
        if error.name != "torch":
            raise
        print(f"error: {arguments.command} needs torch, which is not installed here", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlserver-torch-stream", description="Stream from PyTorch models: the server, and further commands."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (_, help_line) in _COMMANDS.items():
        # The subcommand parses everything after its name, also --help.
        command = commands.add_parser(name, help=help_line, add_help=False, prefix_chars="\0")
        command.add_argument("rest", nargs=argparse.REMAINDER)
    return parser
