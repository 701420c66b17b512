"""Reports each request as one line of the log and one OpenTelemetry span.

In the log a client's text is quoted as JSON, so that it cannot forge a line or control a terminal. Prompts, answers and
error messages are left out unless the operator asks for them; error messages may quote the other two.

The attributes of a span follow the GenAI semantic conventions (repository open-telemetry/semantic-conventions-genai, in
development). The conventions have no attribute for the time in the queue, so vLLM's name is used,
``gen_ai.latency.time_in_queue``. A span contains neither prompts nor answers.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from mlserver.settings import Settings
from mlserver.tracing import get_tracer_provider
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.server.observability.request_observer import RequestRecord, logger
from mlserver_torch_stream.types import ChatPrompt, GenerationRequest, Prompt, TextPrompt
from mlserver_torch_stream.version import __version__

_PACKAGE = "mlserver_torch_stream"
_PLAIN = re.compile(r"[-_.:/+@0-9A-Za-z]+")
# Every line has these fields.
_LINE = (
    "request_id=%s model=%s version=%s endpoint=%s status=%s client=%s finish_reason=%s sequences=%s prompt_tokens=%s "
    "completion_tokens=%s queue_time_ms=%s ttft_ms=%s e2e_latency_ms=%s"
)
_MAX_CHARS = 128  # characters of a text that a client chooses


def join_mlservers_log() -> None:
    """Gives our loggers MLServer's level and handlers, unless the operator configures our loggers. Idempotent.

    Without that only warnings would be shown, because our loggers are not below the logger ``mlserver``.
    """
    logging.getLogger(_PACKAGE).parent = logging.getLogger("mlserver")


class TextLog:
    """Writes one line for each request. With ``prompts`` it adds prompts, answers and error messages.

    ``structured`` says that MLServer puts the lines into JSON strings.
    """

    def __init__(self, *, prompts: bool = False, structured: bool = False) -> None:
        self.prompts = prompts
        self._structured = structured

    def write(self, record: RequestRecord) -> None:
        """Writes the line of a request that has ended."""
        if not logger.isEnabledFor(logging.INFO):
            return
        line = _LINE % self._values(record)
        line += "".join(f" {key}={value}" for key, value in self._further(record))
        # MLServer's structured format does not escape the text of `"message"`.
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
    """Returns the text unchanged if it cannot be misread in a log line; else as a JSON string in ASCII."""
    if len(text) > _MAX_CHARS:
        text = f"{text[:_MAX_CHARS]}..."
    return text if _PLAIN.fullmatch(text) else _json(text)


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def span_starter(settings: Settings) -> Callable[[RequestRecord], GenAiSpan] | None:
    """Returns the function that starts the span of a request; None if MLServer's tracing is off."""
    if not settings.tracing_server:
        return None
    return partial(GenAiSpan, get_tracer_provider(settings).get_tracer(_PACKAGE, __version__))


class GenAiSpan:
    """The span of one request. The span's parent is the current span of the calling task."""

    def __init__(self, tracer: Tracer, record: RequestRecord) -> None:
        request = record.request
        chat = request is not None and isinstance(request.prompts[0], ChatPrompt)
        operation = "chat" if chat else "text_completion"
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _PACKAGE,
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
            "gen_ai.response.id": record.request_id,
            "mlserver_torch_stream.model.version": record.version,
            "mlserver_torch_stream.endpoint": record.endpoint.value,
        }
        if request is not None:
            attributes.update(_request_attributes(request))
        self._span = tracer.start_span(f"{operation} {record.model}", kind=SpanKind.INTERNAL, attributes=attributes)

    def first_token(self) -> None:
        """Adds the event of the first token."""
        self._span.add_event("gen_ai.first_token")

    def end(self, record: RequestRecord) -> None:
        """Writes the request's tokens, times in seconds and error into the span, and ends the span."""
        span = self._span
        span.set_attribute("gen_ai.usage.input_tokens", record.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", record.completion_tokens)
        span.set_attribute("gen_ai.response.finish_reasons", [reason.value for reason in record.reasons])
        if record.ttft_s is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", record.ttft_s)
        if record.queue_s is not None:
            span.set_attribute("gen_ai.latency.time_in_queue", record.queue_s)
        if record.error is not None:
            span.set_attribute("error.type", type(record.error).__name__)
            # The message of a client's error may quote its prompt.
            span.set_status(Status(StatusCode.ERROR, str(record.error) if record.status >= 500 else None))
        elif record.client_disconnected:
            span.set_attribute("error.type", "client_disconnected")
            span.set_status(Status(StatusCode.ERROR, "the client disconnected"))
        span.end()


def _request_attributes(request: GenerationRequest) -> dict[str, AttributeValue]:
    sampling = request.sampling
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
    }
    if sampling.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
    if sampling.seed is not None:
        attributes["gen_ai.request.seed"] = sampling.seed
    return attributes
