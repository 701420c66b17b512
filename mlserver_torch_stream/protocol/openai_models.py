"""Declares the bodies of OpenAI's requests: chat completions, completions and responses.

The decoder and the OpenAPI document both use these models. Each parameter is marked as supported, ignored or refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len, MaxLen, MinLen
from pydantic import Discriminator, Field, Tag, create_model

from mlserver_torch_stream.protocol.bodies import (
    FAIL_FAST,
    OBJECT_OR_TEXT,
    SPENDS,
    WHOLE,
    Because,
    Body,
    Entries,
    Ignored,
    JsonObject,
    NonEmpty,
    OrList,
    Refused,
    Text,
    TokenIds,
)
from mlserver_torch_stream.protocol.chat import MAX_TOOL_NAME, MAX_TOOLS, ChatMessage, FunctionTools, Tool, ToolFunction
from mlserver_torch_stream.protocol.constraints import Choices, JsonGuide, ResponseFormat, StructuredOutputs
from mlserver_torch_stream.protocol.parameters import (
    LEAST_REPETITION_PENALTY,
    MAX_BAD_WORDS,
    MAX_SALT_CHARACTERS,
    MAX_STOP_STRINGS,
    Effort,
)
from mlserver_torch_stream.protocol.values import MAX_TOKEN_IDS, METADATA, UNIMPLEMENTED

LOGPROBS = "message.output_text.logprobs"
Positive = Annotated[int, Ge(1), WHOLE]
NotNegative = Annotated[int, Ge(0), WHOLE]
Alternatives = Annotated[int, Ge(0), Le(20), WHOLE]
Share = Annotated[float, Gt(0), Le(1)]
Penalty = Annotated[float, Ge(-2), Le(2)]
Strings = Annotated[list[NonEmpty], FAIL_FAST]


class NamedModel(Body, extra="ignore"):
    """The model that a body names."""

    model: NonEmpty
    model_version: NonEmpty | None = None


_TYPES = {str: Text, dict: JsonObject, bool: bool}
if TYPE_CHECKING:

    class _OfEveryBody(Body):
        """The parameters on which no answer depends, and the parameters that are not implemented."""
else:
    _OfEveryBody = create_model(
        "_OfEveryBody",
        __base__=Body,
        **{name: (Annotated[Any, Refused(harmless)], None) for name, harmless in UNIMPLEMENTED.items()},
        **{name: (Annotated[_TYPES[kind] | None, Ignored()], None) for name, kind in METADATA.items()},
    )


class Generation(_OfEveryBody, NamedModel, extra="forbid"):
    """The parameters that all three bodies have."""

    stream: bool | None = None
    temperature: Annotated[float, Ge(0), Le(100)] | None = None
    top_p: Share | None = None
    stop: OrList[NonEmpty, Annotated[Strings, MaxLen(MAX_STOP_STRINGS)]] | None = None
    seed: Annotated[int, Ge(-(2**63)), Le(2**64 - 1), WHOLE] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Entries[Annotated[float, Ge(-100), Le(100)]] | None = None
    # Parameters of vLLM that OpenAI's API does not have.
    top_k: Annotated[int, Ge(-1), WHOLE] | None = None
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    typical_p: Share | None = None
    repetition_penalty: Annotated[float, Ge(LEAST_REPETITION_PENALTY), Le(100)] | None = None
    min_tokens: NotNegative | None = None
    stop_token_ids: Annotated[TokenIds, MaxLen(MAX_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    bad_words: OrList[NonEmpty, Annotated[Strings, MaxLen(MAX_BAD_WORDS)]] | None = None
    guided_json: JsonGuide | None = None
    guided_regex: NonEmpty | None = None
    guided_choice: Choices | None = None
    guided_grammar: NonEmpty | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[NonEmpty, MaxLen(MAX_SALT_CHARACTERS)] | None = None
    priority: Annotated[int, Ge(0), Le(2**31 - 1), WHOLE] | None = None
    # Parameters that only this runtime has.
    timeout: Annotated[int, Ge(0), Le(2**53), WHOLE] | None = None


class StreamOptions(Body):
    """Which token counts a stream contains in addition to its choices."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class _Choices(Generation):
    """The parameters of chat completions and completions."""

    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    n: Positive | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None


class Thinking(Body):
    """Whether the model reasons, as in Anthropic's API. ``budget_tokens`` is accepted and has no effect."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[NotNegative | None, Ignored()] = None


class _Talk(Generation):
    """The parameters of chat completions and responses."""

    top_logprobs: Alternatives | None = None
    chat_template_kwargs: JsonObject | None = None
    tool_choice: Annotated[str | JsonObject | None, Because(OBJECT_OR_TEXT)] = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    enable_thinking: bool | None = None
    thinking: Thinking | None = None


class ChatCompletionRequest(_Choices, _Talk):
    """The body of ``/v1/chat/completions``. Without ``max_tokens`` the answer may fill the context."""

    echo: Annotated[Any, Refused((False,))] = None

    messages: Annotated[list[ChatMessage], MinLen(1), FAIL_FAST, SPENDS]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    tools: FunctionTools | None = None
    reasoning_effort: Effort | None = None


def _kind_of_prompt(prompt: Any) -> str | None:
    if not isinstance(prompt, list):
        return "a text" if isinstance(prompt, str) else None
    first = prompt[0] if prompt else ""
    return "some texts" if isinstance(first, str) else "some prompts" if isinstance(first, list) else "some ids"


class CompletionRequest(_Choices):
    """The body of ``/v1/completions``. Without ``max_tokens`` the answer has at most 256 tokens.

    The prompt is a text, a list of texts, a list of token ids, or a list of such lists.
    """

    prompt: Annotated[
        Annotated[NonEmpty, Tag("a text")]
        | Annotated[Strings, MinLen(1), Tag("some texts")]
        | Annotated[TokenIds, MinLen(1), Tag("some ids")]
        | Annotated[list[Annotated[TokenIds, MinLen(1)]], MinLen(1), FAIL_FAST, SPENDS, Tag("some prompts")],
        Discriminator(
            _kind_of_prompt,
            custom_error_type="wrong",
            custom_error_message="must be a string, or a list of strings or token ids",
        ),
    ]
    max_tokens: NotNegative | None = None
    echo: bool | None = None
    logprobs: Alternatives | None = None


class InputText(Body, extra="ignore"):
    """A part of a message or of a function's result."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


class ReasoningText(Body, extra="ignore"):
    """A part of an earlier answer's reasoning."""

    type: Literal["reasoning_text"]
    text: Text


class SummaryText(Body, extra="ignore"):
    """A part of a summary of reasoning."""

    type: Literal["summary_text"]
    text: Text


_Parts = OrList[Text, Annotated[list[InputText], FAIL_FAST, SPENDS]]


class _Item(Body):
    id: Text | None = None
    status: Text | None = None


class InputWarning(_Item):
    """A warning of an earlier answer, which has no effect."""

    type: Literal["warning"]
    message: Text


class InputMessage(_Item):
    """A message of a conversation."""

    type: Literal["message"] | None = None
    role: NonEmpty
    content: _Parts
    phase: Text | None = None


class _InputCall(_Item):
    call_id: Text
    name: Text
    namespace: Text | None = None
    caller: Annotated[JsonObject | None, Ignored()] = None


class InputCall(_InputCall):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    arguments: Text


class InputCustomCall(_InputCall):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    input: Text


class InputCallOutput(_Item):
    """The result of a call of a function or a custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: _Parts
    caller: Annotated[JsonObject | None, Ignored()] = None
    name: Annotated[Text | None, Ignored()] = None  # the call has both
    namespace: Annotated[Text | None, Ignored()] = None


class InputReasoning(_Item):
    """The reasoning of an earlier answer: its text or, if it has no text, its summary."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], FAIL_FAST, SPENDS] | None = None
    content: Annotated[list[ReasoningText], FAIL_FAST, SPENDS] | None = None


_KINDS = (
    *("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning"),
    "warning",
)


def _kind_of_item(item: Any) -> str | None:
    """Returns the item's type; an item without a type is a message."""
    kind = item.get("type") if isinstance(item, dict) else None
    if not isinstance(kind, str):
        return "a message" if kind is None else None
    return f"a {kind.replace('custom_tool_call_output', 'function_call_output')}" if kind in _KINDS else None


Item = Annotated[
    Annotated[InputMessage, Tag("a message")]
    | Annotated[InputCall, Tag("a function_call")]
    | Annotated[InputCustomCall, Tag("a custom_tool_call")]
    | Annotated[InputCallOutput, Tag("a function_call_output")]
    | Annotated[InputReasoning, Tag("a reasoning")]
    | Annotated[InputWarning, Tag("a warning")],
    Discriminator(_kind_of_item, custom_error_type="type", custom_error_message=f"must be {' or '.join(_KINDS)}"),
]


class ResponseFunction(ToolFunction, Tool):
    """A function, in the form of the Responses API."""


class TextInput(Body):
    """Any text."""

    type: Literal["text"]


class GrammarInput(Body):
    """Text that matches a grammar or a regular expression."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: NonEmpty


class CustomTool(Body, extra="ignore"):
    """A tool whose input is one text."""

    type: Literal["custom"]
    name: Annotated[str, Len(1, MAX_TOOL_NAME)]
    description: Text | None = None
    format: Annotated[TextInput | GrammarInput, Field(discriminator="type")] | None = None


TOOL_KINDS = ("function", "custom", "namespace")


def _kind_of_tool(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return f"a {kind}" if kind in TOOL_KINDS else None


def _tools(message: str) -> Discriminator:
    return Discriminator(_kind_of_tool, custom_error_type="type", custom_error_message=message)


_Callable = Annotated[ResponseFunction, Tag("a function")] | Annotated[CustomTool, Tag("a custom")]


class NamespaceTool(Body, extra="ignore"):
    """A group of tools. A call names the tool and this namespace."""

    type: Literal["namespace"]
    name: Annotated[str, Len(1, MAX_TOOL_NAME)]
    description: Text | None = None
    tools: Annotated[
        list[Annotated[_Callable, _tools("only function and custom are implemented")]], MaxLen(MAX_TOOLS), FAIL_FAST
    ]


ResponseTool = Annotated[
    _Callable | Annotated[NamespaceTool, Tag("a namespace")],
    _tools("only function, custom and namespace are implemented"),
]


class TextFormat(Body):
    """The format of an answer's text: free text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """The options of an answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Body):
    """How much the model reasons. The server never writes a summary, which the value ``auto`` permits."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Body):
    """The options of a stream's events."""

    include_obfuscation: bool | None = None


# The values for hosted tools and images are accepted, because a response without them has nothing to include.
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ModelResponseRequest(_Talk):
    """The body of ``/v1/responses``. The server keeps no responses.

    Without ``max_output_tokens`` the answer may fill the context.
    """

    input: OrList[NonEmpty, Annotated[list[Item], MinLen(1), FAIL_FAST, SPENDS]]
    instructions: Text | None = None
    max_output_tokens: Positive | None = None
    tools: Annotated[list[ResponseTool], MaxLen(MAX_TOOLS), FAIL_FAST] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    # Encrypted reasoning is not needed, because an item of reasoning contains its text.
    include: Annotated[list[Included], MaxLen(16), FAIL_FAST] | None = None
    metadata: Entries[Text] | None = None
    stream_options: ResponseStreamOptions | None = None
    store: Annotated[Any, Refused((False,))] = None
    background: Annotated[Any, Refused((False,))] = None
    truncation: Annotated[Any, Refused(("disabled", "auto"))] = None
    previous_response_id: Annotated[Any, Refused()] = None
    conversation: Annotated[Any, Refused()] = None
    prompt: Annotated[Any, Refused()] = None
    max_tool_calls: Annotated[Any, Refused()] = None
    context_management: Annotated[Any, Refused(([],))] = None
    access_programs: Annotated[Any, Refused()] = None
    background_options: Annotated[Any, Refused()] = None
    image: Annotated[Any, Refused()] = None
