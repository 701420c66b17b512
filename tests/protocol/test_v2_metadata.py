"""The declared inputs and outputs are the ones that work."""

from __future__ import annotations

from dataclasses import replace

from mlserver.grpc.converters import ModelMetadataResponseConverter
from mlserver.types import MetadataModelResponse

from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.seldon_spelling import SELDON
from mlserver_torch_stream.protocol.spelling import ReplyContext
from mlserver_torch_stream.protocol.v2_reply import input_metadata, output_metadata
from mlserver_torch_stream.tool_calls import ToolCallDelta
from mlserver_torch_stream.types import FinishReason, TokenEvent, Usage
from tests.protocol.asked import asked


def test_every_tensor_that_is_accepted_is_declared_once() -> None:
    spellings = []
    for tensor in input_metadata():
        aliases = tensor.parameters.model_extra["aliases"].split(",") if tensor.parameters else []
        spellings += [tensor.name, *aliases]
    assert sorted(spellings) == sorted(names.INPUT_TENSORS)


def test_every_output_of_a_reply_is_declared_with_its_datatype() -> None:
    reply = SELDON.whole(asked(cumulative_logprob=True, logprobs=True, token_ids=True), ReplyContext("m"))
    end = TokenEvent(0, "y", (1,), finish_reason=FinishReason.STOP, usage=Usage(1, 1))
    reply.add(replace(end, reasoning="so", tool_calls=(ToolCallDelta(0, "c", "f", "{}"),)))
    sent = {output["name"]: output["datatype"] for output in reply.body()["outputs"]}
    assert sent == {tensor.name: tensor.datatype for tensor in output_metadata()}


def test_the_declaration_survives_grpc() -> None:
    metadata = MetadataModelResponse(name="m", platform="p", inputs=input_metadata(), outputs=output_metadata())
    message = ModelMetadataResponseConverter.from_types(metadata)
    assert [tensor.name for tensor in message.inputs] == [tensor.name for tensor in input_metadata()]
    assert message.inputs[0].parameters["aliases"].string_param.startswith("prompt,")
