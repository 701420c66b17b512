"""Injects faults for tests of a real server, so that a chosen call of the forward fails.

Fault injection is switched on only by an environment variable; the load then logs a warning.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.forward.interface import Forward, Logits
from mlserver_torch_stream.errors import LoadFailed

VARIABLE = "MLSERVER_TORCH_STREAM_FAULTS"
_FORM = re.compile(r"(?P<phase>prefill|decode):(?P<call>\d+):(?P<kind>raise|oom|nan|death|slow=(?P<seconds>[\d.]+))")


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault in one forward of a phase: number ``call``, counted from 1.

    ``slow`` also applies to every later forward.
    """

    phase: str
    call: int
    kind: str
    seconds: float = 0.0


def read_faults(environ: Mapping[str, str]) -> tuple[InjectedFault, ...]:
    """Reads faults such as ``decode:5:raise,prefill:2:oom,decode:9:nan,decode:20:death,decode:1:slow=0.1``.

    Raises LoadFailed for an unknown fault.
    """
    text = environ.get(VARIABLE, "")
    faults = []
    for part in text.split(",") if text else ():
        match = _FORM.fullmatch(part.strip())
        if match is None:
            raise LoadFailed(f"{VARIABLE}: {part!r} is not a fault; write, for example, decode:5:raise")
        kind = match["kind"].partition("=")[0]
        faults.append(InjectedFault(match["phase"], int(match["call"]), kind, float(match["seconds"] or 0)))
    return tuple(faults)


class FaultyForward:
    """A forward with faults. A batch with prompts and decoding sequences counts as a call in both phases.

    ``raise`` raises an exception, ``oom`` raises torch's out-of-memory error, and ``death`` ends the engine's thread.
    ``nan`` sets the logits of the phase's first row to NaN. ``slow`` sleeps for that many seconds.
    """

    def __init__(self, faults: Sequence[InjectedFault], forward: Forward) -> None:
        self._faults = faults
        self._forward = forward
        self._calls = {"prefill": 0, "decode": 0}

    def __call__(self, batch: Batch, cache: PagedCache) -> Logits:
        phases = [_phase(each) for each in batch.sequences]
        for phase in set(phases):
            self._calls[phase] += 1
        due = [fault for fault in self._faults if fault.phase in phases]
        now = [fault for fault in due if fault.call == self._calls[fault.phase]]
        kinds = {fault.kind for fault in now}
        time.sleep(max((f.seconds for f in due if f.kind == "slow" and f.call <= self._calls[f.phase]), default=0))
        if "raise" in kinds:
            raise RuntimeError("an injected fault")
        if "oom" in kinds:
            raise torch.OutOfMemoryError("an injected fault: out of memory")
        if "death" in kinds:
            raise SystemExit("an injected fault: the engine's death")
        logits = self._forward(batch, cache)
        for fault in now:
            if fault.kind == "nan":
                logits = Logits(logits.tensor.clone())
                logits.tensor[sum(each.wanted for each in batch.sequences[: phases.index(fault.phase)])] = torch.nan
        return logits


def _phase(sequence: BatchSequence) -> str:
    """Returns the phase.

    A decoding sequence has one new token and perhaps drafts; logits are wanted for all of them.
    """
    return "decode" if sequence.start > 0 and sequence.count == max(1, sequence.wanted) else "prefill"
