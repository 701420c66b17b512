"""``cloud run --on ray``: the parts of one run spread over a Ray cluster, as lanes that never share a part.

Knows Ray Data and how lanes are named; a lane is the same command with ``--worker I/N``, in a process of Ray's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from mlserver_torch_stream.cli import cloud as options
from mlserver_torch_stream.cloud.faults import Refused
from mlserver_torch_stream.cloud.job import plan


def run_on_ray(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """The exit status: the worst of the lanes'."""
    try:
        import ray
    except ImportError:
        raise Refused("--on ray: needs the extra [ray]: pip install 'mlserver-torch-stream[ray]'") from None
    from mlserver_torch_stream.cli.cloud_run import model_name
    from mlserver_torch_stream.cli.interrupt import run_to_end

    async def claim() -> int:
        planned = await plan(options.make_job(arguments, await model_name(arguments)))
        await planned.aclose()
        return len(planned.objects)

    if arguments.dry_run:
        raise Refused("--dry-run: says nothing of a cluster; leave --on away")
    run_to_end(claim())  # what is wrong with the run is told here, before the cluster hears of it
    count = arguments.workers
    typed = [*argv, "--progress", "off"]
    lanes = [{"argv": json.dumps([*typed, "--worker", f"{lane}/{count}"])} for lane in range(1, count + 1)]
    found = ray.data.from_items(lanes, override_num_blocks=count).map(_lane, concurrency=count).take_all()
    print(f"{sum(row['rows'] for row in found)} rows by {count} workers", file=sys.stderr)
    return int(max(row["status"] for row in found))


def _lane(row: dict[str, Any]) -> dict[str, Any]:
    """One lane, in a process of Ray's."""
    from mlserver_torch_stream.cli.cloud_run import run
    from mlserver_torch_stream.cloud.meter import Meter

    arguments = options.parser().parse_args(json.loads(row["argv"]))
    arguments.on = None
    meter = Meter()
    try:
        return {"status": run(arguments, meter), "rows": meter.rows}
    except Refused as error:
        print(f"error: {error.message}", file=sys.stderr)
        return {"status": options.REFUSED, "rows": 0}
