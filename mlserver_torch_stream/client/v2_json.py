"""Translates a call of the client into the tensors and parameters of a V2 request, and V2 replies into deltas."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from mlserver_torch_stream.client.call import Delta, GenerationCall, GenerationError, Logprob, RequestUsage
from mlserver_torch_stream.types import TokenLogprob
from mlserver_torch_stream.v2_reader import ServerReply, read_reply

_TOOLS = "tools"
MODELS_PATH = "/v2/repository/index"
MODELS_BODY = {"ready": True}


def input_tensors(call: GenerationCall) -> dict[str, list[str]]:
    """Returns, by name, the elements of the BYTES tensors for the prompt and the tools."""
    if call.messages is None:
        tensors = {"text_input": list(call.prompts)}
    else:
        tensors = {"messages": [_json(list(call.messages))]}
    return {**tensors, **{name: [_json(call.parameters[name])] for name in (_TOOLS,) if name in call.parameters}}


def plain_parameters(call: GenerationCall) -> dict[str, Any]:
    """Returns the parameters that are not tensors."""
    return {name: value for name, value in call.parameters.items() if name != _TOOLS}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def deltas_of(reply: ServerReply) -> list[Delta]:
    """Returns the deltas of a reply. Raises GenerationError if the reply carries an error."""
    if reply.error is not None:
        raise GenerationError(f"the generation failed: {reply.error}")
    usage = None
    if reply.prompt_tokens is not None and reply.completion_tokens is not None:
        usage = RequestUsage(reply.prompt_tokens, reply.completion_tokens)
    last = reply.sequences[-1]
    return [
        Delta(
            text=sequence.text or "",
            index=sequence.index,
            token_ids=sequence.token_ids,
            logprobs=tuple(map(_logprob, sequence.logprobs or ())),
            cumulative_logprob=sequence.cumulative_logprob,
            finish_reason=sequence.finish_reason,
            num_input_tokens=sequence.num_input_tokens,
            num_output_tokens=sequence.num_output_tokens,
            usage=usage if sequence is last else None,
            final=reply.final and sequence is last,
            reasoning=sequence.reasoning or "",
            tool_calls=sequence.tool_calls,
        )
        for sequence in reply.sequences
    ]


def _logprob(entry: TokenLogprob) -> Logprob:
    assert entry.logprob is not None, "a token of an answer has a token before it"
    top = tuple(Logprob(logprob, token_id) for token_id, logprob in entry.top)
    return Logprob(entry.logprob, entry.token_id, top=top)


def http_request(call: GenerationCall, stream: bool = True) -> tuple[str, dict[str, Any]]:
    """Returns the path and the body of a call over HTTP. If not ``stream``, the request asks for one whole reply."""
    tensors = [
        {"name": name, "shape": [len(texts)], "datatype": "BYTES", "data": texts}
        for name, texts in input_tensors(call).items()
    ]
    endpoint = "generate_stream" if stream else "infer"
    path = f"/v2/models/{quote(call.model, safe='')}/{endpoint}"
    return path, {"inputs": tensors, "parameters": plain_parameters(call)}


def read_event(data: str) -> list[Delta]:
    """Returns the deltas of one server-sent event. Raises GenerationError, or one of ``UNREADABLE``."""
    return deltas_of(read_reply(json.loads(data)))


def model_names(index: Any) -> list[str]:
    """Returns the names in an answer to ``MODELS_PATH``."""
    return sorted({item["name"] for item in index})
