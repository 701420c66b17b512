"""How each kind of server is asked for an exact number of tokens, and how its events are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.answers import Ask


def _sampling(ask: Ask) -> Mapping[str, Any]:
    drawn = {"temperature": ask.temperature, "seed": 1} if ask.temperature else {"temperature": 0}
    return {**drawn, "structured_outputs": {"json": ask.schema}} if ask.schema else drawn


@dataclass(frozen=True)
class V2Spelling:
    """MLServer's V2 ``generate_stream``: ours, and runtimes that a reader might write by hand."""

    model: str

    @property
    def path(self) -> str:
        return f"/v2/models/{self.model}/generate_stream"

    def body(self, ask: Ask) -> Mapping[str, Any]:
        tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [ask.prompt]}
        fixed = {"max_tokens": ask.new_tokens, "ignore_eos": True, **_sampling(ask)}
        return {"inputs": [tensor], "parameters": fixed}

    def text(self, event: Mapping[str, Any]) -> str:
        return "".join(str(output["data"][0]) for output in event["outputs"] if output["name"] == "text_output")

    def usage(self, event: Mapping[str, Any]) -> tuple[int, int] | None:
        counts = {output["name"]: output["data"][0] for output in event["outputs"]}
        if "num_output_tokens" not in counts:
            return None
        return int(counts["num_input_tokens"]), int(counts["num_output_tokens"])


@dataclass(frozen=True)
class OpenAISpelling:
    """``/v1/completions``, with what a server needs besides to ignore the end of text and to cache nothing."""

    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    path: str = "/v1/completions"

    def body(self, ask: Ask) -> Mapping[str, Any]:
        return {
            "model": self.model,
            "prompt": ask.prompt,
            "max_tokens": ask.new_tokens,
            **_sampling(ask),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }

    def text(self, event: Mapping[str, Any]) -> str:
        return "".join(choice.get("text") or "" for choice in event.get("choices") or ())

    def usage(self, event: Mapping[str, Any]) -> tuple[int, int] | None:
        usage = event.get("usage")
        return (int(usage["prompt_tokens"]), int(usage["completion_tokens"])) if usage else None
