"""The table of request parameters. The reference pages are generated from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mlserver_torch_stream.protocol import constraints, values
from mlserver_torch_stream.types import ModelInfo

DEFAULT_MAX_TOKENS = 256  # the default for answers to prompts; answers in conversations may fill the context
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 64
MAX_SALT_CHARACTERS = 1024  # as in vLLM
MAX_STRING_BYTES = 4096  # bytes of one parameter's strings, for which the engine's thread searches every answer
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
LEAST_REPETITION_PENALTY = 0.01  # it divides logits, and a smaller one makes them infinite


@dataclass(frozen=True, slots=True)
class Parameter:
    """One request parameter: its names, the reader of its value, and the use of the value.

    ``field`` is the field of SamplingParameters that gets the value; None if no field gets it unchanged. ``tensor`` is
    the parameter's datatype as an input tensor; None if it cannot be a tensor.
    """

    name: str
    meaning: str  # a cell of a table in docs/settings.md; it may have links relative to that page
    read: values.Reader
    aliases: tuple[str, ...] = ()
    field: str | None = None
    tensor: str | None = None
    several: bool = False  # True: as a tensor it may have more than one element


def _sampling(
    name: str, meaning: str, read: values.Reader, *aliases: str, tensor: str | None = None, several: bool = False
) -> Parameter:
    return Parameter(name, meaning, read, aliases, name, tensor, several)


def _flag(name: str, meaning: str) -> Parameter:
    return Parameter(name, meaning, values.boolean, tensor="BOOL")


def _stream_mode(value: Any, info: ModelInfo) -> str:
    if value == "session":
        raise ValueError("session is not implemented")
    return str(values.one_of("each", "prompt")(value, info))


PARAMETERS: tuple[Parameter, ...] = (
    _sampling(
        "max_tokens",
        "The maximum number of tokens of the answer. Default: from `default_sampling`, else from the model's "
        "generation config; if neither has one, 256 for an answer to a prompt, and for an answer to messages what the "
        "context and the cache hold. When the context is full, an answer ends with `length`, whatever this says. With "
        "`echo` or `prompt_logprobs` it may be 0: then only the prompt is scored.",
        values.integer(0),
        "max_new_tokens",
        "max_completion_tokens",
        tensor="INT64",
    ),
    _sampling("min_tokens", "The minimum number of tokens of the answer.", values.integer(0)),
    _sampling("temperature", "0 is greedy decoding.", values.number(0, 100), tensor="FP32"),
    _sampling(
        "top_p",
        "1 switches it off. A request with `temperature`, `top_p`, `top_k`, `min_p` or `typical_p` asks for sampling.",
        values.number(0, 1, above_low=True),
        tensor="FP32",
    ),
    _sampling("top_k", "0 or -1 switches it off.", values.top_k, tensor="INT64"),
    _sampling("min_p", "As in transformers; 0 switches it off.", values.number(0, 1)),
    _sampling("typical_p", "As in transformers; 1 switches it off.", values.number(0, 1, above_low=True)),
    _sampling(
        "repetition_penalty",
        "Applies to tokens of the prompt and the answer, as in transformers; 1 switches it off.",
        values.number(LEAST_REPETITION_PENALTY, 100),
    ),
    _sampling("presence_penalty", "Applies to tokens of the answer, as in OpenAI's API.", values.number(-2, 2)),
    _sampling("frequency_penalty", "Applies to tokens of the answer, as in OpenAI's API.", values.number(-2, 2)),
    _sampling("logit_bias", "An object of up to 4,096 token ids and numbers from -100 to 100.", values.logit_bias),
    _sampling(
        "bad_words",
        "Up to 64 strings that are never generated, of 4,096 bytes together.",
        values.strings(MAX_BAD_WORDS, MAX_STRING_BYTES),
        tensor="BYTES",
        several=True,
    ),
    _sampling(
        "stop",
        "Up to 16 strings that end the answer, of 4,096 bytes together.",
        values.strings(MAX_STOP_STRINGS, MAX_STRING_BYTES),
        "stop_words",
        tensor="BYTES",
        several=True,
    ),
    _sampling("stop_token_ids", "Up to 4,096 ids of tokens that end the answer.", values.token_ids),
    _sampling("include_stop_str_in_output", "The answer ends with the stop string.", values.boolean),
    Parameter(
        "eos_token_id",
        "Ids that replace the model's own end token.",
        values.token_ids,
        ("eos_token_ids",),
        field="eos_token_ids",
    ),
    _sampling("ignore_eos", "The model's end token does not end the answer.", values.boolean),
    _sampling("seed", "The same seed gives the same tokens.", values.seed, "random_seed", tensor="INT64"),
    _sampling("n", "Answers per prompt, at most `max_num_seqs`.", values.row_count),
    Parameter("logprobs", "True, or the number of alternatives for each token.", values.logprobs),
    Parameter("top_logprobs", "Number of alternatives for each token, up to 20.", values.integer(0, 20)),
    _sampling(
        "prompt_logprobs",
        "The number of alternatives for each token of the [scored prompt](scores.md), up to 20; 0 scores only the "
        "token itself.",
        values.integer(0, 20),
    ),
    _sampling("skip_special_tokens", "Leaves special tokens out of the text; default true.", values.boolean),
    _sampling(
        "cache_salt",
        "A string of up to 1,024 characters; the prefix cache shares tokens only between requests with the same salt, "
        "so that the time of an answer does not show how another client's prompt begins.",
        values.bounded_text(MAX_SALT_CHARACTERS),
    ),
    Parameter("chat_template_kwargs", "An object for the chat template.", values.json_object),
    Parameter(
        "add_generation_prompt",
        "Whether the chat template begins an answer, even after a message of the assistant.",
        values.boolean,
    ),
    Parameter(
        "continue_final_message",
        "Whether the answer continues the last message; by default it does if that is the assistant's.",
        values.boolean,
    ),
    Parameter(
        "add_special_tokens",
        "Whether the tokenizer's special tokens are added; by default they are added to texts that do not begin "
        "with one, and not to conversations.",
        values.boolean,
    ),
    Parameter(
        "enable_thinking",
        "Whether the model may [reason](tools.md#reasoning) before it answers.",
        values.boolean,
    ),
    Parameter(
        "thinking",
        "The same as an object, whose `type` is `enabled`, `adaptive` or `disabled`; no budget bounds the reasoning.",
        values.thinking,
    ),
    Parameter(
        "tool_choice",
        "As in OpenAI's API: `auto`, `none`, `required`, or one function ([tools](tools.md)).",
        values.tool_choice,
        tensor="BYTES",
    ),
    Parameter(
        "parallel_tool_calls",
        "If false, the answer ends with its first call ([tools](tools.md)).",
        values.boolean,
        tensor="BYTES",
    ),
    Parameter(
        "reasoning_effort",
        "`none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`, "
        "for [templates that read it](tools.md#reasoning).",
        values.one_of(*get_args(Effort)),
    ),
    Parameter(
        "response_format",
        "As in OpenAI's API: with `json_object` or `json_schema` the answer [matches it](structured-output.md).",
        constraints.response_format,
        tensor="BYTES",
    ),
    Parameter(
        "structured_outputs",
        "vLLM's [constraints](structured-output.md): `json`, `json_object`, `regex`, `choice` or `grammar`.",
        constraints.structured_outputs,
    ),
    *(
        Parameter(
            f"guided_{kind}", f"vLLM's older name for `{kind}` of `structured_outputs`.", constraints.guided(kind)
        )
        for kind in constraints.GUIDED
    ),
    Parameter(
        "guided_decoding_guide",
        "The schema, regular expression or grammar for `guided_decoding_guide_type`.",
        constraints.text,
        tensor="BYTES",
    ),
    Parameter(
        "guided_decoding_guide_type",
        "As in TensorRT-LLM: `json`, `json_schema`, `regex` or `ebnf_grammar`.",
        constraints.guide_type,
        tensor="BYTES",
    ),
    Parameter(
        "stream_mode",
        "The meaning of several messages on one gRPC stream: [`each` or `prompt`](protocol.md#grpc).",
        _stream_mode,
    ),
    Parameter(
        "lora_name",
        "The [LoRA adapter](engines.md#adapters) that generates the answer.",
        values.adapter,
        tensor="BYTES",
    ),
    Parameter("priority", "1 is highest; the default is 100.", values.integer(0, 2**31 - 1)),
    Parameter("timeout", "The maximum time from arrival to the last token, in microseconds.", values.integer(0, 2**53)),
    Parameter("echo", "Puts the prompt before the answer; not in streams of V2.", values.boolean),
    # Every reply has what this asks for: a response with triton_final_response, empty or not.
    Parameter(
        "triton_enable_empty_final_response",
        "No effect: every reply ends with a final response.",
        values.boolean,
    ),
    _flag("stream", "False on a stream endpoint asks for one response."),
    _flag("exclude_input_in_output", "False means the same as `echo`."),
    _flag("return_finish_reason", "Adds the output `finish_reason`; default true."),
    _flag("return_cumulative_logprob", "Adds the output `cumulative_logprob`."),
    _flag("return_logprobs", "Adds the output `logprobs`."),
    _flag("return_token_ids", "Adds the output `token_ids`."),
    _flag("return_num_input_tokens", "Adds the output `num_input_tokens`; default true."),
    _flag("return_num_output_tokens", "Adds the output `num_output_tokens`; default true."),
)


BY_SPELLING: Mapping[str, Parameter] = {
    spelling: parameter for parameter in PARAMETERS for spelling in (parameter.name, *parameter.aliases)
}
TENSORS: Mapping[str, Parameter] = {name: parameter for name, parameter in BY_SPELLING.items() if parameter.tensor}

OPENAI_BODIES = ("llm_parameters", "kwargs")
SILENT = frozenset({"headers", "content_type", "binary_data_output"})
# Parameters of OpenAI's bodies that no token depends on; they are accepted.
SILENT_IN_BODY = frozenset({"model", "stream_options", *values.METADATA})
