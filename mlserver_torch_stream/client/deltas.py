"""Defines deltas, which a stream yields: each has the text and tokens that one event adds to one sequence.

Knows nothing of protocols.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlserver_torch_stream.tool_calls import ToolCallDelta


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token. V2 names the token by its id, OpenAI's API by its text.

    ``top``: the most likely tokens at this position, as far as they were asked for.
    """

    logprob: float
    token_id: int | None = None
    token: str | None = None
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """The tokens of all prompts and of all answers of one request."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event adds to sequence ``index``. Sequences are numbered prompt by prompt.

    A sequence's last delta has its finish reason and, in V2, its counts. The last delta of the request is ``final``
    and has the usage, where the server tells it.
    """

    text: str = ""
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    usage: RequestUsage | None = None
    final: bool = False
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __str__(self) -> str:
        return self.text
