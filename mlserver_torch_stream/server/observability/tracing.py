"""Writes one OpenTelemetry span per request, a child of the server span of MLServer's instrumentation.

Knows nothing of metrics and logs. The attributes are those of the GenAI semantic conventions (repository
open-telemetry/semantic-conventions-genai, in development). They have no attribute for the time in the queue, which has
vLLM's name, ``gen_ai.latency.time_in_queue``. A span holds neither prompts nor answers.
"""

from __future__ import annotations

from mlserver.settings import Settings
from mlserver.tracing import get_tracer_provider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from mlserver_torch_stream.server.observability.request_record import RequestRecord
from mlserver_torch_stream.types import ChatPrompt, GenerationRequest
from mlserver_torch_stream.version import __version__

_NAME = "mlserver_torch_stream"
FIRST_TOKEN = "gen_ai.first_token"


def tracer_of(settings: Settings) -> Tracer | None:
    """None if MLServer's tracing is off."""
    if not settings.tracing_server:
        return None
    tracer: Tracer = get_tracer_provider(settings).get_tracer(_NAME, __version__)
    return tracer


def start_span(tracer: Tracer, record: RequestRecord) -> Span:
    """Starts a span whose parent is the span of the calling task's context."""
    request = record.request
    chat = request is not None and isinstance(request.prompts[0], ChatPrompt)
    operation = "chat" if chat else "text_completion"
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _NAME,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.request_id,
        "mlserver_torch_stream.model.version": record.version,
        "mlserver_torch_stream.endpoint": record.endpoint.value,
    }
    if request is not None:
        attributes.update(_request_attributes(request))
    return tracer.start_span(f"{operation} {record.model}", kind=SpanKind.INTERNAL, attributes=attributes)


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


def end_span(span: Span, record: RequestRecord) -> None:
    span.set_attribute("gen_ai.usage.input_tokens", record.prompt_tokens)
    span.set_attribute("gen_ai.usage.output_tokens", record.completion_tokens)
    span.set_attribute("gen_ai.response.finish_reasons", [reason.value for reason in record.reasons])
    if record.ttft_s is not None:
        span.set_attribute("gen_ai.response.time_to_first_chunk", record.ttft_s)
    if record.queue_s is not None:
        span.set_attribute("gen_ai.latency.time_in_queue", record.queue_s)
    if record.error is not None:
        span.set_attribute("error.type", type(record.error).__name__)
        # The message of a client's error may quote its input.
        span.set_status(Status(StatusCode.ERROR, str(record.error) if record.status >= 500 else None))
    elif record.client_disconnected:
        span.set_attribute("error.type", "client_disconnected")
        span.set_status(Status(StatusCode.ERROR, "the client disconnected"))
    span.end()
