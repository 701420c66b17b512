"""Defines the types that all parts of this package share: prompts, sampling parameters, requests, token events."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from mlserver_torch_stream.tool_calls import ToolCallDelta, ToolChoice, join_calls


class FinishReason(str, Enum):
    """Why a sequence ended. The values are the strings that are sent to clients."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


FAILURES = (FinishReason.ABORT, FinishReason.ERROR, FinishReason.TIMEOUT)


class StreamMode(str, Enum):
    """What several messages on one gRPC stream mean.

    With ``EACH`` every message is a separate request, and all run concurrently. With ``PROMPT`` the messages are pieces
    of one prompt, which is answered at half-close.
    """

    EACH = "each"
    PROMPT = "prompt"


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Raw text. ``add_special_tokens`` says whether BOS and similar tokens are added; None means that they are added
    unless the text begins with BOS.
    """

    text: str
    add_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """A prompt of token ids, used unchanged."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered by the model's chat template.

    With ``add_generation_prompt`` the rendered text ends with a generation prompt, which begins the answer. With
    ``continue_final_message`` the answer continues the last message. If both are None, the answer continues the last
    message only if that is the assistant's. ``messages`` are dicts in OpenAI's format; ``tools`` and
    ``template_kwargs`` are passed to the template unchanged. ``tool_choice`` has a meaning only with ``tools``.
    ``field`` is the name of the request's parameter with the messages.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    field: str = "messages"
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool = False

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        if self.add_generation_prompt is None and self.continue_final_message is None:
            return self.messages[-1].get("role") == "assistant"
        return bool(self.continue_final_message)

    @property
    def begins_answer(self) -> bool:
        """Whether the text ends with a generation prompt."""
        return not self.continues and self.add_generation_prompt is not False


Prompt = TextPrompt | TokensPrompt | ChatPrompt


class ConstraintKind(str, Enum):
    """The language in which a constraint is written."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A rule that a sequence's whole answer must match. The constraint does not apply to the reasoning before the
    answer.

    ``source`` is a JSON Schema as JSON text, a regular expression, a JSON list of strings, a grammar in Lark's
    language, or nothing for a JSON object of any kind. ``field`` is the name of the request's parameter with the
    constraint.
    """

    kind: ConstraintKind
    source: str
    field: str


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How tokens are chosen and when a sequence ends. The values are validated, and the model's defaults are filled in.

    The order of the transformations is the order in transformers' ``generate``: penalties and biases, temperature,
    top-k, top-p, min-p, typical-p. Log-probabilities are computed from the raw logits, before any transformation.
    """

    # None allows as many as the context holds; with 0 the prompt is read and nothing is generated.
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0  # 0 means greedy
    top_k: int = 0  # 0 switches it off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # over prompt and answer, as transformers
    presence_penalty: float = 0.0  # counts the tokens of the answer, as OpenAI does
    frequency_penalty: float = 0.0  # counts the tokens of the answer, as OpenAI does
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    eos_token_ids: tuple[int, ...] | None = None  # None means the model's own
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    # Alternatives for each token of the prompt; None means that the prompt is not scored.
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    cache_salt: str | None = None  # the prefix cache shares pages only between requests of the same salt

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class GenerationRules:
    """The model's own rules: transformers' ``suppress_tokens``, ``begin_suppress_tokens``, ``bad_words_ids``,
    ``forced_…``."""

    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    forced_bos: tuple[int, ...] = ()  # after a prompt of one token
    forced_eos: tuple[int, ...] = ()  # the token that is forced when a sequence reaches its maximum length


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """The parts of the reply that the client asked for, apart from the text."""

    finish_reason: bool = True
    num_input_tokens: bool = True
    num_output_tokens: bool = True
    cumulative_logprob: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    details: bool = False  # flat JSON only
    echo_prompt: bool = False  # the answer's text starts with the prompt
    outputs: frozenset[str] | None = None  # None means all
    usage_message: bool = False  # OpenAI's streams: the token counts, as a message of their own
    continuous_usage: bool = False  # in addition to that message: the counts of each chunk's sequence so far
    warnings: tuple[str, ...] = ()  # the parts of a Responses request that are ignored
    repeated: Mapping[str, Any] = field(default_factory=dict)  # parameters that OpenAI's response objects repeat


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request of one client: B prompts with n sequences each. Sequences are numbered prompt by prompt, from 0 to
    B*n-1.
    """

    request_id: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParameters = SamplingParameters()
    reply: ReplyOptions = ReplyOptions()
    stream: bool | None = None  # None means that the endpoint decides
    stream_mode: StreamMode = StreamMode.EACH
    priority: int | None = None  # 1 is highest; None means the default
    timeout_s: float | None = None  # seconds from submit to the last token; None means the setting's value
    client: str = ""  # waiting requests of one client share its place in the queue; empty if the client is not named
    constraint: Constraint | None = None  # must match each answer; None allows any text
    adapter: str | None = None  # the LoRA adapter that generates the answer; None means the model itself


# The largest size of one event, in characters. Its line then stays below 48 KiB in every spelling; some proxies read
# lines of at most 64 KiB. A character is at most 19 bytes: a control character, which Seldon's spelling writes three
# times, once as JSON within JSON. A log-probability is up to 190 bytes there, each alternative up to 130, and each byte
# of a token up to 11.
MAX_PER_EVENT = 1536
_TIMES_REASONING = 2  # OpenAI's objects repeat the reasoning under two names
_CHARACTERS_PER_LOGPROB = 10
_CHARACTERS_PER_ALTERNATIVE = 7


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithms of the probabilities of one token and of the most likely tokens at its position.

    ``logprob`` is None for the first token of a prompt, which has no token before it. ``token`` and ``top_tokens`` are
    the tokens' bytes, in the order of ``top``; if only ids are known, they are None and empty.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    token: bytes | None = None
    top_tokens: tuple[bytes, ...] = ()
    special: bool = False  # a special token of the tokenizer, such as its end token

    @property
    def size(self) -> int:
        """The length in characters."""
        token_bytes = len(self.token or b"") + sum(map(len, self.top_tokens))
        return _CHARACTERS_PER_LOGPROB + _CHARACTERS_PER_ALTERNATIVE * len(self.top) + token_bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and times of one finished sequence. Times are in seconds since the request was submitted."""

    num_input_tokens: int
    num_output_tokens: int
    queue_s: float = 0.0
    ttft_s: float = 0.0
    num_cached_tokens: int = 0  # tokens of the prompt that came from the prefix cache
    num_reasoning_tokens: int = 0  # output tokens of the reasoning before the answer, and of the marks around it


@dataclass(slots=True)  # a frozen dataclass takes five times as long to create
class TokenEvent:
    """The tokens of one sequence since its previous event. The last event of a sequence also says why it ended.

    The contents of an event are in this order: ``prompt_text`` and ``prompt_logprobs``, ``reasoning``, ``text``,
    ``tool_calls``. ``text`` is only the answer's text. It never ends within a character or within a possible stop
    string, so it may be empty although ``token_ids`` is not. ``finish_reason`` and ``usage`` are set on the last event
    of a sequence, and on no other. ``error`` is set only with ``FinishReason.ERROR``, ``TIMEOUT`` and ``ABORT``, for
    clients that have not been sent anything yet. ``stop_reason`` is the stop string, or the id of ``stop_token_ids``,
    that ended the sequence; None for the model's own end token.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: Exception | None = None
    stop_reason: int | str | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    prompt_text: str = ""  # the prompt, if the request asks for its text
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # one entry for each token of the prompt, in order
    num_input_tokens: int = 0  # the length of the prompt, on every event that the engine's thread delivers
    prompt_ids: Sequence[int] = field(default=(), compare=False, repr=False)  # the prompt's tokens, on the same events

    @property
    def has_output(self) -> bool:
        """Whether there is anything to show. An event may have ids but no text, as long as the character that they
        belong to is not complete.
        """
        return bool(self.text or self.reasoning or self.tool_calls or self.prompt_text)

    @property
    def size(self) -> int:
        """The size in characters; ``MAX_PER_EVENT`` is the limit."""
        said = (
            len(self.prompt_text)
            + len(self.text)
            + _TIMES_REASONING * len(self.reasoning)
            + sum(call.size for call in self.tool_calls)
        )
        scored = sum(entry.size for entry in self.prompt_logprobs) if self.prompt_logprobs else 0
        return said + len(self.token_ids) + sum(entry.size for entry in self.logprobs) + scored

    def goes_before(self, later: TokenEvent) -> bool:
        """Whether one event for both keeps the order in which their contents were generated."""
        return not ((self.tool_calls and (later.reasoning or later.text)) or (self.text and later.reasoning))

    def merge(self, later: TokenEvent) -> TokenEvent:
        """Returns one event for this one and a later event of the same sequence. ``goes_before`` says whether they can
        be merged.
        """
        return TokenEvent(
            index=self.index,
            text=self.text + later.text,
            reasoning=self.reasoning + later.reasoning,
            tool_calls=join_calls(self.tool_calls + later.tool_calls) if later.tool_calls else self.tool_calls,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            cumulative_logprob=later.cumulative_logprob,
            finish_reason=later.finish_reason,
            usage=later.usage,
            error=later.error,
            stop_reason=later.stop_reason,
            prompt_text=self.prompt_text + later.prompt_text,
            prompt_logprobs=self.prompt_logprobs + later.prompt_logprobs,
            num_input_tokens=later.num_input_tokens,
            prompt_ids=later.prompt_ids,
        )

    def split_failure(self) -> tuple[TokenEvent, ...]:
        """Splits an event with tokens and a failure into two events, so that the client gets the tokens before the
        error.
        """
        if self.finish_reason not in FAILURES or not self.size:
            return (self,)
        end = TokenEvent(self.index, finish_reason=self.finish_reason, usage=self.usage, error=self.error)
        return replace(self, finish_reason=None, usage=None, error=None), end


def add_event(events: MutableSequence[TokenEvent], later: TokenEvent) -> None:
    """Adds an event to the earlier events of its sequence. Merges it with the last one if the result is small enough
    and its contents stay in order.
    """
    if events and events[-1].size + later.size <= MAX_PER_EVENT and events[-1].goes_before(later):
        events[-1] = events[-1].merge(later)
    else:
        events.append(later)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of a loaded model against which the protocol validates a request.

    ``default_sampling`` holds request parameters (``temperature``, ``max_tokens``, …) from the model's generation
    config, overridden by those in the settings. A request's own values override both.
    """

    vocab_size: int
    max_model_len: int  # tokens, prompt and answer together
    max_num_seqs: int  # the maximum number of sequences that decode at a time, which bounds n
    has_chat_template: bool = False
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str | None = None  # the notation of its tool calls, or "none"; None if its template does not say
    reasons: bool = False  # whether its answers may begin with reasoning
    template_arguments: frozenset[str] = frozenset()  # the arguments about tools and reasoning that the template reads
    attention: str = ""  # in a word: `kernels`, `varlen`, `torch`, `transformers` (the model's own) or `vllm`
    adapters: frozenset[str] | None = None  # the names of its LoRA adapters; None if its engine does not support any


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The marks around the reasoning of an answer. ``begin`` is None if the prompt has already begun the reasoning;
    otherwise an answer without ``begin`` has no reasoning.
    """

    end: str
    begin: str | None = None
