"""Compares the engine over emulated device maps with the engine of another checkout: tokens/s by streams.

``python -m benchmarks.device_maps --before CHECKOUT`` keeps a process of each, which take turns of a second or two, so
that other load on the machine falls on both. A device is a stage of the pipeline that sleeps after it has computed, so
it needs no core; with 0 ms only the engine's own work and the arithmetic of a tiny model are left. Each checkout uses
its own ``tests/engine/emulated.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
DEVICES = 4
NEW_TOKENS = 32
STREAMS = (1, 4, 16)
MILLISECONDS = (0.0, 2.0)  # a device takes for a batch

Turn = tuple[float, float]
"""Tokens/s, and the milliseconds of CPU time for a token."""


def measure() -> None:
    """For each line ``INDEX STREAMS`` of the standard input takes a turn, and prints its figures.

    ``INDEX`` is a place in ``MILLISECONDS``.
    """
    import torch

    from tests.engine.emulated import Busy, laid_out, pipelined, together
    from tests.engine.tiny_models import prompt_of, tiny_model

    torch.set_num_threads(1)
    with ExitStack() as stack:
        engines = []
        for milliseconds in MILLISECONDS:
            model = laid_out(tiny_model("llama", num_hidden_layers=DEVICES), DEVICES)
            pipeline = Busy(model, milliseconds / 1000).pipeline
            engine = pipelined(model, pipeline, max_num_seqs=max(STREAMS), context=4 * NEW_TOKENS)
            engines.append(stack.enter_context(engine)[0])
        for line in sys.stdin:
            index, streams = map(int, line.split())
            requests = [(prompt_of(8, number), NEW_TOKENS) for number in range(streams)]
            began, cpu = time.perf_counter(), time.process_time()
            answers = asyncio.run(together(engines[index], requests))
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            tokens = sum(map(len, answers))
            assert tokens == streams * NEW_TOKENS
            print(tokens / seconds, 1000 * cpu / tokens, flush=True)


class Contender:
    """The process of a checkout, which measures when it is asked."""

    def __init__(self, checkout: Path, stack: ExitStack) -> None:
        # With -m, this file's own checkout would come before the other one.
        code = f"import sys; sys.path[0] = {str(checkout)!r}; import runpy; runpy.run_path({__file__!r})['measure']()"
        command = [str(checkout / ".venv" / "bin" / "python"), "-c", code]
        process = subprocess.Popen(command, cwd=checkout, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.enter_context(process)  # at its end the process reads the end of its input
        assert process.stdin is not None and process.stdout is not None
        self._input, self._output = process.stdin, process.stdout

    def turn(self, index: int, streams: int) -> Turn:
        """Measures one cell once."""
        print(index, streams, file=self._input, flush=True)
        speed, cpu = map(float, self._output.readline().split())
        return speed, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="another checkout, installed")
    parser.add_argument("--sweeps", type=int, default=10)
    options = parser.parse_args()
    found: dict[tuple[int, int], list[tuple[Turn, Turn]]] = {}
    with ExitStack() as stack:
        now, before = (Contender(checkout, stack) for checkout in (ROOT, options.before.absolute()))
        for sweep in range(options.sweeps + 1):
            for cell in ((index, streams) for index in range(len(MILLISECONDS)) for streams in STREAMS):
                turns = [each.turn(*cell) for each in ((now, before) if sweep % 2 else (before, now))]
                if sweep:  # the first turns warm up
                    found.setdefault(cell, []).append((turns[0], turns[1]) if sweep % 2 else (turns[1], turns[0]))
            if sweep:
                print(_table(found), flush=True)


def _table(found: dict[tuple[int, int], list[tuple[Turn, Turn]]]) -> str:
    """Returns the medians; the ratio is the median of the ratios of turns that follow each other."""
    lines = ["| a device takes | streams | tokens/s | before | ratio | CPU ms a token | before |", "|---" * 7 + "|"]
    for (index, streams), pairs in found.items():
        speeds, cpu = ([[turn[figure] for turn in side] for side in zip(*pairs, strict=True)] for figure in (0, 1))
        ratio = median(one / other for one, other in zip(*speeds, strict=True))
        rates, times = ([f"{median(side):.{digits}f}" for side in sides] for sides, digits in ((speeds, 1), (cpu, 2)))
        row = f"{MILLISECONDS[index]:g} ms", str(streams), *rates, f"{ratio:.2f}", *times
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
