"""Writes one log line per request at its end, as ``key=value`` pairs, in the format of MLServer's own lines.

Knows nothing of log handlers. A client's text is quoted as JSON, so that it can forge no line and no terminal command.
Prompts, answers and error messages, which may quote them, are left out unless the operator asks for them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.server.observability.request_record import RequestRecord
from mlserver_torch_stream.types import ChatPrompt, Prompt, TextPrompt

_PACKAGE = "mlserver_torch_stream"
_PLAIN = re.compile(r"[-_.:/+@0-9A-Za-z]+")
# Every line has these fields.
_LINE = (
    "request_id=%s model=%s version=%s endpoint=%s status=%s client=%s finish_reason=%s sequences=%s prompt_tokens=%s "
    "completion_tokens=%s queue_time_ms=%s ttft_ms=%s e2e_latency_ms=%s"
)
_MOST_CHARS = 128  # of a text that a client chooses

logger = logging.getLogger(f"{_PACKAGE}.requests")


def join_mlservers_log() -> None:
    """Gives our loggers MLServer's level and handlers, unless an operator configures their own. Idempotent.

    Our loggers' names are not below ``mlserver``, so that without it only warnings would be shown.
    """
    logging.getLogger(_PACKAGE).parent = logging.getLogger("mlserver")


class RequestLog:
    """``prompts`` adds prompts, answers and error messages; ``structured``: MLServer puts lines into JSON strings."""

    def __init__(self, *, prompts: bool = False, structured: bool = False) -> None:
        self.prompts = prompts
        self._structured = structured

    def write(self, record: RequestRecord) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        line = _LINE % self._values(record)
        line += "".join(f" {key}={value}" for key, value in self._further(record))
        # MLServer's structured format does not escape what it puts between the quotes of `"message"`.
        logger.info("%s", json.dumps(line)[1:-1] if self._structured else line)

    def _values(self, record: RequestRecord) -> tuple[str | int, ...]:
        return (
            _quoted(record.request_id),
            _quoted(record.model),
            _quoted(record.version),
            record.endpoint.value,
            record.status,
            "disconnected" if record.client_disconnected else "connected",
            ",".join(reason.value for reason in record.reasons) or "-",
            record.sequences,
            record.prompt_tokens,
            record.completion_tokens,
            _milliseconds(record.queue_s),
            _milliseconds(record.ttft_s),
            _milliseconds(record.e2e_s),
        )

    def _further(self, record: RequestRecord) -> Iterator[tuple[str, str]]:
        if record.error is not None:
            yield "error", type(record.error).__name__
        if isinstance(record.error, InvalidInput):
            yield "field", _quoted(record.error.field)
        if self.prompts:
            yield from _contents(record)


def _contents(record: RequestRecord) -> Iterator[tuple[str, str]]:
    if record.prompts:
        yield "prompts", _json([_prompt(prompt) for prompt in record.prompts])
    if record.texts:
        yield "outputs", _json(["".join(record.texts[index]) for index in sorted(record.texts)])
    if record.error is not None:
        yield "error_message", _json(str(record.error))


def _prompt(prompt: Prompt) -> Any:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if isinstance(prompt, ChatPrompt):
        return prompt.messages
    return prompt.token_ids


def _quoted(text: str) -> str:
    """The text itself if it is unambiguous in a line; otherwise a JSON string of ASCII characters."""
    if len(text) > _MOST_CHARS:
        text = f"{text[:_MOST_CHARS]}..."
    return text if _PLAIN.fullmatch(text) else _json(text)


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"
