"""``mlserver-torch-stream cloud``: inference over the objects of a bucket, a folder or a list of URLs.

Runs the subcommand and returns its exit status. With ``--on ray`` a run is spread over a Ray cluster: each of Ray's
processes runs the same command with ``--worker I/N``, and writes one lane of the output's parts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from mlserver_torch_stream.cli.cloud_options import parser
from mlserver_torch_stream.cli.cloud_settings import INTERRUPTED, REFUSED, check, make_run
from mlserver_torch_stream.cli.interruptible import Interrupted, LoadInterrupted, run_to_end
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.lease import RENEW_S, SILENCE_S
from mlserver_torch_stream.cloud.rows import InUse, RunRefused
from mlserver_torch_stream.cloud.run import plan
from mlserver_torch_stream.cloud.sink import Done, find_done
from mlserver_torch_stream.cloud.store import Store
from mlserver_torch_stream.log_text import log_text


def main(argv: Sequence[str]) -> int:
    """Runs ``cloud run`` or ``cloud watch`` and returns one of the exit statuses that the command's help lists."""
    arguments = parser().parse_args(list(argv))
    try:
        check(arguments)
        if arguments.command == "watch":
            from mlserver_torch_stream.cli.cloud_watch import watch

            return watch(arguments)
        if arguments.on is not None:
            return _run_on_ray(arguments, list(argv))
        from mlserver_torch_stream.cli.cloud_run import run

        return run(arguments)
    except LoadInterrupted:
        print("interrupted while the model was loading; nothing was inferred", file=sys.stderr)
        return INTERRUPTED
    except Interrupted:
        print("interrupted before anything was inferred", file=sys.stderr)
        return INTERRUPTED
    except RunRefused as error:
        return _refused(error)


def _run_on_ray(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Runs all lanes on a Ray cluster, and returns the largest exit status of the lanes."""
    try:
        import ray
    except ImportError:
        raise RunRefused("--on ray: needs the extra [ray]: pip install 'mlserver-torch-stream[ray]'") from None
    from mlserver_torch_stream.cli.cloud_run import model_name

    async def check() -> None:
        await plan(make_run(arguments, await model_name(arguments)))

    async def held() -> Done:
        output = Store.open(arguments.output, dict(arguments.storage), arguments.stall, make=False)
        return await find_done(output, arguments.part_rows, Retry(arguments.tries))

    if arguments.dry_run:
        raise RunRefused("--dry-run: cannot be combined with --on")
    run_to_end(check())  # a wrong option is reported before any task is started
    count = arguments.workers
    typed = [*argv, "--progress", "off"]
    lane = ray.remote(run_lane)
    lanes = [lane.remote([*typed, "--worker", f"{index}/{count}"]) for index in range(1, count + 1)]
    status = int(max(ray.get(lanes)))
    done = run_to_end(held())  # also counts the parts of earlier runs and of workers that died
    print(f"{done.rows} rows in {arguments.output}, {done.failed} failed; {count} workers", file=sys.stderr)
    return status


def run_lane(argv: Sequence[str]) -> int:
    """Runs one lane in one of Ray's processes. If the process dies, Ray runs the lane again in a new one.

    The new process keeps the parts that the lane has already written, and infers the rest.
    """
    from mlserver_torch_stream.cli.cloud_run import run

    arguments = parser().parse_args(list(argv))
    arguments.on = None
    end = time.monotonic() + SILENCE_S + RENEW_S
    while True:
        try:
            check(arguments)  # also sets the defaults of options that need --url
            return run(arguments)
        except InUse as error:  # the holder may be this lane's process on a machine that died
            if time.monotonic() > end:
                return _refused(error)
            time.sleep(RENEW_S / 3)
        except RunRefused as error:
            return _refused(error)


def _refused(error: RunRefused) -> int:
    print(f"error: {log_text(error.message)}", file=sys.stderr)
    return REFUSED
