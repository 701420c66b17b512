"""Decides which sequences are computed again after a forward has failed or returned NaN.

Sequences share pages, so such a forward may affect sequences that were not in its batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from mlserver_torch_stream.engine.request_state import SequenceState
from mlserver_torch_stream.engine.scheduler.ledger import PageLedger, ScheduledSequence, StepPart


class Restarts:
    """Restarts sequences of a ledger: they lose their pages, and their parts of steps in flight are void."""

    def __init__(self, ledger: PageLedger) -> None:
        self._ledger = ledger

    def isolate(self, parts: Iterable[StepPart]) -> list[SequenceState]:
        """Prepares the parts of a failed forward to be tried again in smaller batches.

        Some sequences have to be computed from the start instead, because they share pages that were not written, or
        because the batch had a copy for them, even if the copy was made. Returns these sequences; their parts, in this
        batch or a later batch, are void.
        """
        void = self.void([each for part in parts if (each := self._ledger.get(part.sequence)) is not None])
        return [*void, *self.recompute(())]

    def recompute(self, sequences: Iterable[SequenceState]) -> list[SequenceState]:
        """Restarts sequences whose forward failed. Returns all sequences whose parts are void now.

        These are the given sequences, sequences that share their pages, and sequences with a copy in flight.
        """
        given = set(sequences)
        failed = [scheduled for scheduled in self._ledger if scheduled.sequence in given or scheduled.copied]
        void = self.void(failed)
        for scheduled in failed:
            self._ledger.restart(scheduled)
        return [*(scheduled.sequence for scheduled in failed), *void]

    def void(self, failed: Sequence[ScheduledSequence]) -> list[SequenceState]:
        """Forgets the pages that the parts in flight should have written, and restarts the sequences that share them.

        The restarted sequences may already have added further pages to the prefix cache. Sequences that share those
        pages are restarted, too.
        """
        found = [scheduled for scheduled in failed if scheduled.part is not None]
        sharing: dict[ScheduledSequence, None] = {}
        while found:
            pages = {page: scheduled for scheduled in found for page in scheduled.pages.forget_unwritten()}
            left = [scheduled for scheduled in self._ledger if scheduled not in sharing] if pages else []
            found = [each for each in left if any(pages.get(page, each) is not each for page in each.pages)]
            sharing.update(dict.fromkeys(found))
        for scheduled in sharing:
            self._ledger.restart(scheduled)
        return [scheduled.sequence for scheduled in sharing]

    def doubt(self, parts: Iterable[StepPart], spoiled: Collection[SequenceState]) -> Collection[SequenceState]:
        """Restarts and returns sequences that may have got NaN from other sequences of their step.

        ``spoiled`` sequences have NaN in their logits. Some forwards also write NaN for earlier tokens of the sequence,
        and so to pages that other sequences of the step read. A sequence is computed again if it is spoiled and shares
        pages that another part of the step wrote, or if it has no logits yet and shares pages that a spoiled sequence
        wrote. Of several spoiled sequences that share pages, only the sequence that wrote the pages fails; the others
        are computed again.
        """
        writers = dict[tuple[int, int], StepPart]()
        sampled = set[SequenceState]()
        for part in parts:
            sampled.update(part.samples)
            if (scheduled := self._ledger.get(part.sequence)) is not None:
                writers.update(dict.fromkeys(scheduled.pages.from_token(part.start), part))
        doubted = [
            scheduled
            for scheduled in self._ledger
            if ((sequence := scheduled.sequence) in spoiled or sequence not in sampled)
            and any(
                sequence is not writer.sequence
                and sequence not in writer.samples
                and (sequence in spoiled or writer.sequence in spoiled)
                for writer in {writers[page] for page in scheduled.pages if page in writers}
            )
        ]
        for scheduled in doubted:
            scheduled.pages.forget_all()
        void = self.void(doubted)
        for scheduled in doubted:
            self._ledger.restart(scheduled)
        return {*void, *(scheduled.sequence for scheduled in doubted)}
