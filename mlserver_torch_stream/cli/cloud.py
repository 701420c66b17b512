"""``mlserver-torch-stream cloud``: inference over the objects of a bucket, a folder or a list of URLs.

Knows which module runs which subcommand and what its end means to a shell; ``cloud_options`` has the options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mlserver_torch_stream.cli.cloud_options import INTERRUPTED, REFUSED, check, parser
from mlserver_torch_stream.cli.interruptible import Interrupted, LeftBehind, leave
from mlserver_torch_stream.cloud.rows import RunRefused
from mlserver_torch_stream.log_text import log_text


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(list(argv))
    try:
        check(arguments)
        if arguments.command == "watch":
            from mlserver_torch_stream.cli.cloud_watch import watch

            return watch(arguments)
        if arguments.on is not None:
            from mlserver_torch_stream.cli.cloud_on_ray import run_on_ray

            return run_on_ray(arguments, list(argv))
        from mlserver_torch_stream.cli.cloud_run import run

        return run(arguments)
    except LeftBehind:
        print("interrupted while the model was loading; nothing was inferred", file=sys.stderr)
        leave(INTERRUPTED)
    except Interrupted:
        print("interrupted before anything was inferred", file=sys.stderr)
        return INTERRUPTED
    except RunRefused as error:
        print(f"error: {log_text(error.message)}", file=sys.stderr)
        return REFUSED
