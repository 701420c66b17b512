"""Compares the engine over emulated device maps with the engine of another checkout: tokens/s and CPU time by streams.

``python -m benchmarks.device_maps --before CHECKOUT`` measures both in turns, in processes of their own. A device is a
stage of the pipeline that sleeps after it has computed, so it needs no core; with 0 ms only the engine's own work and
the arithmetic of a tiny model are left. Each checkout uses its own ``tests/engine/emulated.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
DEVICES = 4
NEW_TOKENS = 48
STREAMS = (1, 4, 16)
MILLISECONDS = (0.0, 2.0)  # a device takes for a batch


def measure() -> None:
    """Prints a line for each cell: milliseconds, streams, tokens/s, and the milliseconds of CPU time for a token."""
    import torch

    from tests.engine.emulated import Busy, laid_out, pipelined, together
    from tests.engine.tiny import prompt_of
    from tests.engine.tiny_models import tiny_model

    torch.set_num_threads(1)
    for milliseconds in MILLISECONDS:
        model = laid_out(tiny_model("llama", num_hidden_layers=DEVICES), DEVICES)
        busy = Busy(model, milliseconds / 1000)
        with pipelined(model, busy.pipeline, max_num_seqs=max(STREAMS), context=2 * NEW_TOKENS) as (engine, _):
            for streams in STREAMS:
                requests = [(prompt_of(8, index), NEW_TOKENS) for index in range(streams)]
                began, cpu = time.perf_counter(), time.process_time()
                answers = asyncio.run(together(engine, requests))
                seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
                assert all(len(answer) == NEW_TOKENS for answer in answers)
                tokens = NEW_TOKENS * streams
                print(milliseconds, streams, tokens / seconds, 1000 * cpu / tokens, flush=True)


Cells = dict[tuple[float, int], tuple[float, float]]


def _measured(checkout: Path) -> Cells:
    # With -m, this file's own checkout would come before the other one.
    code = f"import sys; sys.path.insert(0, {str(checkout)!r}); import runpy; runpy.run_path({__file__!r})['measure']()"
    python = checkout / ".venv" / "bin" / "python"
    done = subprocess.run([python, "-c", code], cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    cells = [line.split() for line in done.stdout.splitlines()]
    return {
        (float(milliseconds), int(streams)): (float(speed), float(cpu)) for milliseconds, streams, speed, cpu in cells
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="another checkout, installed")
    parser.add_argument("--sweeps", type=int, default=6)
    options = parser.parse_args()
    checkouts = [ROOT, options.before.absolute()]
    found: dict[Path, list[Cells]] = {checkout: [] for checkout in checkouts}
    for sweep in range(options.sweeps):
        for checkout in checkouts if sweep % 2 else reversed(checkouts):
            found[checkout].append(_measured(checkout))
            print(checkout.name, found[checkout][-1], file=sys.stderr, flush=True)
        print(_table(*found.values()) if sweep else "", flush=True)


def _table(now: list[Cells], before: list[Cells]) -> str:
    head = "| a device takes | streams | tokens/s: best (median) | before | ratio | least CPU ms a token | before |"
    lines = [head, "|---" * 7 + "|"]
    for cell in now[0]:
        speeds = [[cells[cell][0] for cells in side] for side in (now, before)]
        cpu = [min(cells[cell][1] for cells in side) for side in (now, before)]
        shown = [f"{max(each):.1f} ({median(each):.1f})" for each in speeds]
        ratio = f"{max(speeds[0]) / max(speeds[1]):.2f} ({median(speeds[0]) / median(speeds[1]):.2f})"
        lines.append(
            f"| {cell[0]:g} ms | {cell[1]} | {shown[0]} | {shown[1]} | {ratio} | {cpu[0]:.2f} | {cpu[1]:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
