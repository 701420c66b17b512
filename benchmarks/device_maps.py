"""Compares the engine over emulated device maps with the engine of another checkout: tokens/s by streams.

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
from collections import defaultdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
DEVICES = 4
NEW_TOKENS = 100
STREAMS = (1, 4, 16)
MILLISECONDS = (0.0, 2.0)  # a device takes for a batch


def measure() -> None:
    """Prints a line for each cell: milliseconds, streams, tokens/s."""
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
                began = time.perf_counter()
                answers = asyncio.run(together(engine, requests))
                seconds = time.perf_counter() - began
                assert all(len(answer) == NEW_TOKENS for answer in answers)
                print(milliseconds, streams, NEW_TOKENS * streams / seconds, flush=True)


def _measured(checkout: Path) -> dict[tuple[float, int], float]:
    # Without -m this file's folder would come before the checkout.
    code = f"import sys; sys.path.insert(0, {str(checkout)!r}); import runpy; runpy.run_path({__file__!r})['measure']()"
    python = checkout / ".venv" / "bin" / "python"
    done = subprocess.run([python, "-c", code], cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    cells = [line.split() for line in done.stdout.splitlines()]
    return {(float(milliseconds), int(streams)): float(speed) for milliseconds, streams, speed in cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="another checkout, installed")
    parser.add_argument("--sweeps", type=int, default=5)
    options = parser.parse_args()
    found: dict[Path, dict[tuple[float, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for sweep in range(options.sweeps):
        checkouts = [ROOT, options.before.absolute()]
        for checkout in checkouts if sweep % 2 else reversed(checkouts):
            for cell, speed in _measured(checkout).items():
                found[checkout][cell].append(speed)
                print(checkout.name, *cell, f"{speed:.1f}", file=sys.stderr, flush=True)
    print("| a device takes | streams | tokens/s | before | ratio |\n|---|---|---|---|---|")
    for (milliseconds, streams), speeds in found[ROOT].items():
        now, before = median(speeds), median(found[options.before.absolute()][milliseconds, streams])
        print(f"| {milliseconds:g} ms | {streams} | {now:.1f} | {before:.1f} | {now / before:.2f} |")


if __name__ == "__main__":
    main()
