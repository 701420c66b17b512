"""Writes the ``details`` of the generate extension: why a sequence ended, and its tokens with their log-probabilities.

Knows nothing of the rest of a reply. The names are those of the Open Inference Protocol's text generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlserver_torch_stream.protocol.chat_completion import finite, token_name
from mlserver_torch_stream.protocol.reply_values import CollectedSequence
from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.types import FinishReason, TokenEvent, TokenLogprob


def whole_details(sequence: CollectedSequence) -> JsonObject:
    """Of a sequence with all its tokens."""
    reason = _reason(sequence.finish_reason, sequence.stop_reason)
    return {"finish_reason": reason, "logprobs": [_token(entry) for entry in sequence.logprobs]}


def event_details(event: TokenEvent) -> JsonObject:
    """Of an event with at most one token."""
    token = _token(event.logprobs[0]) if event.logprobs else None
    return {"finish_reason": _reason(event.finish_reason, event.stop_reason), "token": token}


def split_by_token(event: TokenEvent) -> Sequence[TokenEvent]:
    """The event as events of one token each, of which the last has the text."""
    earlier = [TokenEvent(event.index, "", (entry.token_id,), (entry,)) for entry in event.logprobs[:-1]]
    return [*earlier, replace(event, token_ids=event.token_ids[-1:], logprobs=event.logprobs[-1:])]


def _reason(reason: FinishReason | None, stop_reason: int | str | None) -> str | None:
    """A reason that the extension does not know, such as ``timeout``, keeps our name."""
    if reason is FinishReason.STOP:
        return "eos_token" if stop_reason is None else "stop_sequence"
    return None if reason is None else reason.value


def _token(entry: TokenLogprob) -> JsonObject:
    return {
        "id": entry.token_id,
        "text": token_name(entry.token_id, entry.token),
        "logprob": finite(entry.logprob),
        "special": entry.special,
    }
