"""Decodes the messages after the first when a prompt comes in pieces on one stream.

Knows nothing of how many follow, nor of how pieces are joined.
"""

from __future__ import annotations

from mlserver.types import InferenceRequest

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.parameters import SILENT
from mlserver_torch_stream.protocol.v2_prompt import prompt_source, read_prompts
from mlserver_torch_stream.protocol.v2_tensors import parameters_of, read_tensors
from mlserver_torch_stream.protocol.v2_unreadable import refuse_unreadable
from mlserver_torch_stream.types import GenerationRequest, ModelInfo, Prompt, TextPrompt


def decode_piece(payload: InferenceRequest, first: GenerationRequest, info: ModelInfo) -> Prompt:
    """One further, non-empty piece of the prompt that ``first`` began: the same kind of tensor and nothing else."""
    refuse_unreadable(payload)
    for key in parameters_of(payload.parameters):
        if key not in SILENT:
            raise InvalidInput(key, "only the first message of a prompt in pieces takes parameters")
    if payload.outputs:
        raise InvalidInput("outputs", "only the first message of a prompt in pieces names outputs")
    tensors = read_tensors(payload.inputs, names.INPUT_TENSORS, info.max_model_len)
    source = prompt_source(tensors)
    allowed = names.TEXT_TENSORS if isinstance(first.prompts[0], TextPrompt) else (names.INPUT_IDS,)
    if source not in allowed:
        raise InvalidInput(source, f"this prompt began as {allowed[0]} and goes on as that")
    for name in tensors:
        if name != source:
            raise InvalidInput(name, "only the first message of a prompt in pieces takes it")
    prompts = read_prompts(tensors, {}, info)
    if len(prompts) != 1:
        raise InvalidInput(source, f"a piece is one element, got {len(prompts)}")
    return prompts[0]
