"""Encodes token events as V2 responses: one each for a stream, or all of them folded into one.

An event of ``MOST_PER_EVENT`` is a line of less than 48 KiB: nothing else in a response grows beyond a few KiB.
``body`` is a response as REST spells it, ``encode`` and ``response`` are MLServer's model of it. Knows nothing of
where events come from nor of who sends the responses.
"""

from __future__ import annotations

import orjson
from mlserver.types import InferenceResponse

from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.chat_completion import ChatChoice, ChatCompletion, finite
from mlserver_torch_stream.protocol.usage import UsageCounter
from mlserver_torch_stream.protocol.v2_outputs import (
    Body,
    as_response,
    logprobs_json,
    output,
    response,
    shown_outputs,
    totals,
)
from mlserver_torch_stream.types import FinishReason, GenerationRequest, TextPrompt, TokenEvent, TokenLogprob

_MOST_ERROR_CHARACTERS = 512  # of a message in a stream, whose lines are bounded; it may quote anything


class StreamReply:
    """The responses of one streamed request: every event of its sequences, in order, becomes one of them.

    ``created`` is in seconds since the epoch; only Seldon-spelled requests show it. ``request_index`` is given when
    several requests share a stream.
    """

    def __init__(
        self,
        request: GenerationRequest,
        model_name: str,
        model_version: str | None = None,
        *,
        created: int = 0,
        request_index: int | None = None,
    ) -> None:
        self._request_id = request.request_id
        self._model_name = model_name
        self._model_version = model_version
        self._request_index = request_index
        self._tally = UsageCounter(request)
        self._shown = shown_outputs(request.reply)
        self._logprobs = request.sampling.logprobs
        self._chat = ChatCompletion(request.request_id, model_name, created)
        self._begun: set[int] = set()
        self._responses = 0
        self._error = ""

    @property
    def finished(self) -> bool:
        """True once the final response has been made."""
        return not self._tally.unfinished

    def body(self, event: TokenEvent) -> Body:
        """The final response of a request in which a sequence failed has ``error`` beside its outputs."""
        final = self._tally.note(event)
        outputs = self._text_outputs(event)
        outputs += self._token_outputs(event)
        if event.finish_reason is not None:
            outputs += self._last_outputs(event, event.finish_reason)
        if names.OUTPUT_ALL in self._shown:
            outputs.append(self._chunk(event, final))
        self._begun.add(event.index)
        parameters = self._parameters(event, final)
        body = response(self._model_name, self._model_version, self._request_id, parameters, outputs)
        if final and self._error:
            body["error"] = self._error
        return body

    def encode(self, event: TokenEvent) -> InferenceResponse:
        return as_response(self.body(event))

    def fail(self, error: Exception) -> list[Body]:
        """Ends every sequence that has not ended because of ``error``; [] if all have."""
        return [self.body(TokenEvent(i, finish_reason=FinishReason.ERROR, error=error)) for i in self._tally.unfinished]

    def abandon(self, reason: FinishReason) -> list[InferenceResponse]:
        """Ends every sequence that has not ended, so that the request has its final response; [] if it has."""
        return [self.encode(TokenEvent(index=index, finish_reason=reason)) for index in self._tally.unfinished]

    def _parameters(self, event: TokenEvent, final: bool) -> dict[str, str | int | bool]:
        parameters: dict[str, str | int | bool] = {
            "request_id": self._request_id,
            "index": event.index,
            "chunk_index": self._responses,
            "triton_final_response": final,
        }
        self._responses += 1
        if self._request_index is not None:
            parameters["request_index"] = self._request_index
        if event.error is not None:
            self._error = parameters["error"] = _shortened(str(event.error) or type(event.error).__name__)
        if final:
            parameters.update(totals(self._tally))
        return parameters

    def _text_outputs(self, event: TokenEvent) -> list[Body]:
        text = event.text
        outputs = [output(names.TEXT_OUTPUT, [text])] if names.TEXT_OUTPUT in self._shown else []
        for name, value in ((names.ROLE, "assistant"), (names.CONTENT, text), (names.TYPE, "text")):
            if name in self._shown:
                outputs.append(output(name, [value]))
        return outputs

    def _token_outputs(self, event: TokenEvent) -> list[Body]:
        outputs = []
        if names.TOKEN_IDS in self._shown and event.token_ids:
            outputs.append(output(names.TOKEN_IDS, list(event.token_ids)))
        if names.LOGPROBS in self._shown and event.logprobs:
            outputs.append(output(names.LOGPROBS, [logprobs_json(event.logprobs)]))
        if names.CUMULATIVE_LOGPROB in self._shown and event.cumulative_logprob is not None:
            outputs.append(output(names.CUMULATIVE_LOGPROB, [finite(event.cumulative_logprob)]))
        return outputs

    def _last_outputs(self, event: TokenEvent, reason: FinishReason) -> list[Body]:
        outputs = []
        if names.FINISH_REASON in self._shown:
            outputs.append(output(names.FINISH_REASON, [reason.value]))
        if event.usage is not None and names.NUM_INPUT_TOKENS in self._shown:
            outputs.append(output(names.NUM_INPUT_TOKENS, [event.usage.num_input_tokens]))
        if event.usage is not None and names.NUM_OUTPUT_TOKENS in self._shown:
            outputs.append(output(names.NUM_OUTPUT_TOKENS, [event.usage.num_output_tokens]))
        return outputs

    def _chunk(self, event: TokenEvent, final: bool) -> Body:
        logprobs = event.logprobs if self._logprobs else None
        choice = ChatChoice(event.index, event.text, event.finish_reason, logprobs)
        chunk = self._chat.chunk(choice, first=event.index not in self._begun, usage=self._tally if final else None)
        return output(names.OUTPUT_ALL, [orjson.dumps(chunk).decode()])


def _shortened(message: str) -> str:
    return message if len(message) <= _MOST_ERROR_CHARACTERS else f"{message[: _MOST_ERROR_CHARACTERS - 1]}…"


class _Answer:
    """What one sequence has said so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None

    def add(self, event: TokenEvent) -> None:
        self.texts.append(event.text)
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.finish_reason = event.finish_reason
        if event.cumulative_logprob is not None:
            self.cumulative_logprob = event.cumulative_logprob


class UnaryReply:
    """The one response of a request that is answered at once: add every event, then ask for the response."""

    def __init__(
        self, request: GenerationRequest, model_name: str, model_version: str | None = None, *, created: int = 0
    ) -> None:
        self._request = request
        self._model_name = model_name
        self._model_version = model_version
        self._tally = UsageCounter(request)
        self._answers = [_Answer() for _ in self._tally.unfinished]
        self._chat = ChatCompletion(request.request_id, model_name, created)

    @property
    def finished(self) -> bool:
        return not self._tally.unfinished

    def add(self, event: TokenEvent) -> None:
        self._tally.note(event)
        self._answers[event.index].add(event)

    def abandon(self, reason: FinishReason) -> None:
        """Ends every sequence that has not ended, with the text it has."""
        for index in self._tally.unfinished:
            self.add(TokenEvent(index=index, finish_reason=reason))

    def response(self) -> InferenceResponse:
        return as_response(self.body())

    def body(self) -> Body:
        assert self.finished, "a unary reply is asked for before its last event"
        shown = shown_outputs(self._request.reply)
        outputs = [tensor for tensor in (*self._outputs(), *self._chat_outputs()) if tensor["name"] in shown]
        parameters: dict[str, str | int | bool] = {
            "request_id": self._request.request_id,
            "chunk_index": 0,
            "triton_final_response": True,
            **totals(self._tally),
        }
        return response(self._model_name, self._model_version, self._request.request_id, parameters, outputs)

    def _outputs(self) -> list[Body]:
        answers = self._answers
        reasons = [answer.finish_reason.value for answer in answers if answer.finish_reason is not None]
        return [
            output(names.TEXT_OUTPUT, self._texts()),
            output(names.FINISH_REASON, reasons),
            output(names.NUM_INPUT_TOKENS, self._tally.prompt_tokens_each),
            output(names.NUM_OUTPUT_TOKENS, self._tally.completion_tokens_each),
            output(names.CUMULATIVE_LOGPROB, [finite(answer.cumulative_logprob) for answer in answers]),
            output(names.LOGPROBS, [logprobs_json(answer.logprobs) for answer in answers]),
            self._token_ids(),
        ]

    def _texts(self) -> list[str]:
        answers = ["".join(answer.texts) for answer in self._answers]
        if not self._request.reply.echo_prompt:
            return answers
        prompts = [prompt.text if isinstance(prompt, TextPrompt) else "" for prompt in self._request.prompts]
        return [prompts[index // self._request.sampling.n] + text for index, text in enumerate(answers)]

    def _token_ids(self) -> Body:
        """[S] for one sequence; [B·n, longest] for several, the shorter ones filled up with -1."""
        rows = [answer.token_ids for answer in self._answers]
        longest = max(len(row) for row in rows)
        filled = [token_id for row in rows for token_id in (*row, *[-1] * (longest - len(row)))]
        return output(names.TOKEN_IDS, filled, [longest] if len(rows) == 1 else [len(rows), longest])

    def _chat_outputs(self) -> list[Body]:
        if not self._request.reply.chat_tensors:
            return []
        texts = ["".join(answer.texts) for answer in self._answers]
        wanted = self._request.sampling.logprobs
        choices = [
            ChatChoice(index, text, answer.finish_reason, answer.logprobs if wanted else None)
            for index, (text, answer) in enumerate(zip(texts, self._answers, strict=True))
        ]
        return [
            output(names.ROLE, ["assistant"] * len(texts)),
            output(names.CONTENT, texts),
            output(names.TYPE, ["text"] * len(texts)),
            output(names.OUTPUT_ALL, [orjson.dumps(self._chat.whole(choices, self._tally)).decode()]),
        ]
