"""Declares the bodies of Anthropic's Messages API.

The parameters of sampling, and the parameters that are ignored or refused, are the same as in OpenAI's bodies.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Len, MaxLen, MinLen
from pydantic import Discriminator, Field, Tag, model_validator

from mlserver_torch_stream.protocol.bodies import (
    FAIL_FAST,
    SPENDS,
    Because,
    Body,
    Ignored,
    JsonObject,
    NonEmpty,
    OrList,
    Refused,
    Text,
    wrong,
)
from mlserver_torch_stream.protocol.chat import MAX_TOOL_NAME, MAX_TOOLS, MessageMetadata
from mlserver_torch_stream.protocol.openai_models import Generation, NotNegative, Positive, Strings
from mlserver_torch_stream.protocol.parameters import MAX_STOP_STRINGS
from mlserver_torch_stream.protocol.values import shown

_Cached = Annotated[Any, Ignored()]  # no marks are needed, since every prefix is cached


class TextBlock(Body):
    """A text block of a message, of the system prompt or of a tool's result."""

    type: Literal["text"]
    text: Text
    cache_control: _Cached = None
    citations: Annotated[Any, Ignored()] = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """Refuses a block of another type by its type, and not by a key that blocks of text lack."""
        if isinstance(value, dict) and value.get("type") != "text":
            raise wrong(f"only blocks of text are implemented, got {shown(value.get('type'))}", "type")
        return value


class ThinkingBlock(Body):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text
    signature: Annotated[Text | None, Ignored()] = None


class ToolUseBlock(Body):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: JsonObject
    cache_control: _Cached = None
    caller: Annotated[Any, Ignored()] = None
    toolset_name: Annotated[Any, Refused()] = None


class ToolResultBlock(Body):
    """The result of a tool's call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: OrList[Text, Annotated[list[TextBlock], FAIL_FAST, SPENDS]] | None = None
    is_error: bool | None = None
    cache_control: _Cached = None
    toolset_name: Annotated[Any, Refused()] = None


_BLOCKS = ("text", "thinking", "tool_use", "tool_result")


def _kind_of_block(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else None
    return f"a {kind}" if kind in _BLOCKS else None


Block = Annotated[
    Annotated[TextBlock, Tag("a text")]
    | Annotated[ThinkingBlock, Tag("a thinking")]
    | Annotated[ToolUseBlock, Tag("a tool_use")]
    | Annotated[ToolResultBlock, Tag("a tool_result")],
    Discriminator(
        _kind_of_block, custom_error_type="type", custom_error_message=f"only {', '.join(_BLOCKS)} are implemented"
    ),
]


class Turn(MessageMetadata):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: OrList[Text, Annotated[list[Block], FAIL_FAST, SPENDS]]


class ClientTool(Body):
    """A tool that the client runs, as opposed to Anthropic's server tools."""

    type: Annotated[Literal["custom"] | None, Because("tools of the server are not implemented")] = None
    name: Annotated[str, Len(1, MAX_TOOL_NAME)]
    description: Text | None = None
    input_schema: JsonObject
    strict: bool | None = None
    cache_control: _Cached = None
    eager_input_streaming: Annotated[bool | None, Ignored()] = None
    allowed_callers: Annotated[Any, Refused((["direct"],))] = None
    defer_loading: Annotated[Any, Refused((False,))] = None
    input_examples: Annotated[Any, Refused(([],))] = None


class ToolUseChoice(Body):
    """Which tools the answer may use."""

    type: Literal["auto", "any", "tool", "none"]
    name: NonEmpty | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    """Whether the model reasons. ``budget_tokens`` is accepted and has no effect."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[NotNegative | None, Ignored()] = None
    display: Annotated[Any, Refused(("summarized",))] = None


class OutputFormat(Body):
    """The JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Body):
    """How much the model reasons, and the schema that its answer must match."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


# The values of context_management that Claude Code sends, which remove nothing from the conversation.
_KEEPS_ALL: tuple[Any, ...] = (
    {"edits": []},
    *({"edits": [{"type": "clear_thinking_20251015", "keep": keep}]} for keep in ("all", {"type": "all"})),
)


class CountTokensRequest(Generation):
    """The body of ``/v1/messages/count_tokens``."""

    messages: Annotated[list[Turn], MinLen(1), FAIL_FAST, SPENDS]
    system: OrList[Text, Annotated[list[TextBlock], FAIL_FAST, SPENDS]] | None = None
    tools: Annotated[list[ClientTool], MaxLen(MAX_TOOLS), FAIL_FAST] | None = None
    tool_choice: ToolUseChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: JsonObject | None = None
    cache_control: _Cached = None
    speed: Annotated[Text | None, Ignored()] = None
    user_profile_id: Annotated[Text | None, Ignored()] = None
    workspace_id: Annotated[Text | None, Ignored()] = None
    context_management: Annotated[Any, Refused(_KEEPS_ALL)] = None
    mcp_servers: Annotated[Any, Refused(([],))] = None


class MessagesRequest(CountTokensRequest):
    """The body of ``/v1/messages``. Without ``max_tokens`` the answer may go on to the end of the context."""

    max_tokens: Positive | None = None
    stop_sequences: Annotated[Strings, MaxLen(MAX_STOP_STRINGS)] | None = None
    diagnostics: Annotated[JsonObject | None, Ignored()] = None
    inference_geo: Annotated[Text | None, Ignored()] = None
    container: Annotated[Any, Refused()] = None
