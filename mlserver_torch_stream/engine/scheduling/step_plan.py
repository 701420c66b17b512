"""Defines what the scheduler decides for one step.

Knows nothing of tensors or pages: the batch of a plan names those.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mlserver_torch_stream.engine.batch import Batch
from mlserver_torch_stream.engine.request_state import SequenceState


@dataclass(eq=False, slots=True)  # a frozen dataclass takes three times as long to create
class ScheduledSequence:
    """A sequence's part of a step, in the same place as its ``BatchSequence``.

    ``samples`` are the sequences that get a token from the logits of this part. A chunk before the end of a prompt has
    none, the last chunk has all ``n`` of the request, and a decoding sequence has itself. ``drafts`` are the guessed
    tokens at the end of the part, which the step verifies. ``prefills``: the part is a chunk of a prompt, or of a
    sequence that resumes after preemption.
    """

    sequence: SequenceState
    start: int
    count: int
    samples: tuple[SequenceState, ...]
    prefills: bool
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The sequences of one step and their batch. An empty plan has nothing to run.

    ``prompt_tokens`` are those of all chunks of prompts and of sequences that resume.
    """

    scheduled: tuple[ScheduledSequence, ...] = ()
    batch: Batch = field(default_factory=lambda: Batch(()))
    prompt_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.scheduled)

    def __str__(self) -> str:
        """Describes the step in words."""
        parts = [f"the prefill of {prompts} tokens"] if (prompts := self.prompt_tokens) else []
        decoding = sum(not part.prefills for part in self.scheduled)
        parts += [f"the decode step of {decoding} sequence{'s' if decoding > 1 else ''}"] if decoding else []
        return " and ".join(parts)
