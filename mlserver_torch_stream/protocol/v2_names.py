"""The tensors of the V2 spelling: which names are prompts, and what each input and output looks like.

Knows nothing of a request's values.
"""

from __future__ import annotations

from mlserver_torch_stream.protocol.parameters import TENSORS
from mlserver_torch_stream.protocol.seldon_chat import MESSAGE_TENSORS

TEXT_INPUT = "text_input"
TEXT_ALIASES = ("prompt", "text_inputs", "inputs", "args", "array_inputs")
TEXT_TENSORS = (TEXT_INPUT, *TEXT_ALIASES)
INPUT_IDS = "input_ids"
MESSAGES = "messages"
TOOLS = "tools"
SAMPLING_PARAMETERS = "sampling_parameters"

PROMPT_TENSORS = (*TEXT_TENSORS, INPUT_IDS, MESSAGES, *MESSAGE_TENSORS)
INPUT_TENSORS = frozenset({*PROMPT_TENSORS, TOOLS, SAMPLING_PARAMETERS, *TENSORS})

TEXT_OUTPUT = "text_output"
FINISH_REASON = "finish_reason"
NUM_INPUT_TOKENS = "num_input_tokens"
NUM_OUTPUT_TOKENS = "num_output_tokens"
CUMULATIVE_LOGPROB = "cumulative_logprob"
LOGPROBS = "logprobs"
TOKEN_IDS = "token_ids"
REASONING = "reasoning"
TOOL_CALLS = "tool_calls"
ROLE = "role"
CONTENT = "content"
TYPE = "type"
OUTPUT_ALL = "output_all"

OUTPUT_DATATYPES = {
    TEXT_OUTPUT: "BYTES",
    FINISH_REASON: "BYTES",
    NUM_INPUT_TOKENS: "UINT32",
    NUM_OUTPUT_TOKENS: "UINT32",
    CUMULATIVE_LOGPROB: "FP64",
    LOGPROBS: "BYTES",
    TOKEN_IDS: "INT64",
    REASONING: "BYTES",
    TOOL_CALLS: "BYTES",
}
CHAT_OUTPUT_DATATYPES = {ROLE: "BYTES", CONTENT: "BYTES", TYPE: "BYTES", OUTPUT_ALL: "BYTES"}

# The header that names the client of a request, so that one client's flood does not delay other clients.
CLIENT_HEADER = "x-client-id"
