"""Features of Triton's own client over gRPC, with threads and with asyncio, on a port with Triton's framing.

Knows nothing of the server beyond what ``features`` says.
"""

from __future__ import annotations

import asyncio
import json
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from features import NOT_IMPLEMENTED, QUESTION, check_freed, check_refused, feature, main
from tritonclient.utils import InferenceServerException

_PLAIN: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
_LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}
_BAD = "StatusCode.INVALID_ARGUMENT"
_TIMEOUT_S = 60


def _tensor(name: str = "text_input", value: str = "Hello fox") -> Any:
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
    return tensor


def _talk() -> list[Any]:
    return [_tensor("messages", json.dumps(QUESTION))]


def _text(results: list[Any]) -> str:
    return "".join(result.as_numpy("text_output")[0].decode() for result in results)


def _infer(target: str, inputs: list[Any] | None = None, **options: Any) -> Any:
    with triton.InferenceServerClient(target) as client:
        return client.infer("tiny", inputs or [_tensor()], **{"parameters": _PLAIN, **options})


class _Stream:
    """One stream of a client, and what has arrived on it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(callback=lambda result, error: self.arrived.put((result, error)))

    def ask(self, name: str, inputs: list[Any] | None = None, *, model: str = "tiny", **options: Any) -> None:
        asked = {"parameters": _PLAIN, **options}
        self._client.async_stream_infer(model, inputs or [_tensor()], request_id=name, **asked)

    def read(self, count: int) -> tuple[dict[str, list[Any]], list[str], list[str]]:
        """Waits until ``count`` requests have ended.

        Returns their results, the errors, and the ids in the order of the results.
        """
        found: dict[str, list[Any]] = {}
        errors: list[str] = []
        order: list[str] = []
        ended = 0
        while ended + len(errors) < count:
            result, error = self.arrived.get(timeout=_TIMEOUT_S)
            if error is not None:
                errors.append(str(error))
                continue
            response = result.get_response()
            order.append(response.id)
            found.setdefault(response.id, []).append(result)
            ended += response.parameters["triton_final_response"].bool_param
        return found, errors, order


@feature("models")
def models(target: str) -> None:
    with triton.InferenceServerClient(target) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("tiny") and not client.is_model_ready("nobody")
        assert client.get_server_metadata().name == "mlserver"
        assert "text_input" in [tensor.name for tensor in client.get_model_metadata("tiny").inputs]
        config = client.get_model_config("tiny").config
        assert config.model_transaction_policy.decoupled and config.max_batch_size == 0
        assert {tensor.name: tensor.data_type for tensor in config.input}["text_input"] == 13  # TYPE_STRING
        as_json = client.get_model_config("tiny", as_json=True)
        assert as_json["config"]["input"][0]["data_type"] == "TYPE_STRING"
        index = {model.name: model.state for model in client.get_model_repository_index().models}
        assert index["tiny"] == "READY"
        before = client.get_inference_statistics("tiny").model_stats[0].inference_count
        client.infer("tiny", [_tensor()], parameters=_PLAIN)
        assert client.get_inference_statistics("tiny").model_stats[0].inference_count == before + 1
        assert {"tiny", "narrow"} <= {each.name for each in client.get_inference_statistics().model_stats}


@feature("chat")
def chat(target: str) -> None:
    assert _text([_infer(target, _talk())])


@feature("chat, streamed")
def chat_streamed(target: str) -> None:
    with triton.InferenceServerClient(target) as client:
        stream = _Stream(client)
        stream.ask("a", _talk())
        found, errors, _ = stream.read(1)
        client.stop_stream()
    assert not errors and _text(found["a"]) == _text([_infer(target, _talk())])


@feature("prompts")
def prompts(target: str) -> None:
    result = _infer(target, request_id="mine")
    assert result.get_response().id == "mine" and result.as_numpy("num_output_tokens").tolist() == [20]
    assert _text([result])


@feature("prompts, streamed")
def prompts_streamed(target: str) -> None:
    """Sends several requests at once on one stream; one of them is wrong, and the stream continues after its error."""
    whole = _text([_infer(target)])
    with triton.InferenceServerClient(target) as client:
        stream = _Stream(client)
        for name in ("a", "bad", "b", "c"):
            parameters = {**_PLAIN, "temperature": "warm" if name == "bad" else 0.0}
            stream.ask(name, parameters=parameters, enable_empty_final_response=name == "c")
        found, errors, order = stream.read(4)
        assert found.keys() == {"a", "b", "c"} and all(_text(results) == whole for results in found.values())
        assert order.index("c") < len(order) - 1 - order[::-1].index("a"), "they run one after another"
        (error,) = errors
        assert "[request id: bad] temperature: " in error
        stream.ask("d")
        client.stop_stream()
        rest = [stream.arrived.get_nowait() for _ in range(stream.arrived.qsize())]
        assert all(error is None for _, error in rest) and _text([result for result, _ in rest]) == whole


@feature("log-probabilities")
def logprobs(target: str) -> None:
    result = _infer(target, parameters={**_PLAIN, "return_logprobs": True, "top_logprobs": 2})
    entries = json.loads(result.as_numpy("logprobs")[0])
    assert len(entries) == 20 and all(len(entry["top"]) == 2 for entry in entries)


@feature("parameters")
def parameters(target: str) -> None:
    """Tests compression, a chosen output, priority, timeout, and numbers of all kinds."""
    whole = _text([_infer(target)])
    for coding in ("gzip", "deflate"):
        options = {"parameters": {"temperature": 0.0, **_PLAIN}, "priority": 1, "timeout": 60_000_000}
        chosen = [triton.InferRequestedOutput("text_output")]
        again = _infer(target, outputs=chosen, compression_algorithm=coding, **options)
        assert _text([again]) == whole and again.as_numpy("finish_reason") is None


async def _requests(*names: str, **options: Any) -> Any:
    for name in names:
        parameters = {**_PLAIN, **options} if name != "bad" else {"max_tokens": -1}
        yield {"model_name": "tiny", "inputs": [_tensor()], "request_id": name, "parameters": parameters}


@feature("asyncio")
def asynchronous(target: str) -> None:
    async def ask() -> None:
        async with triton_aio.InferenceServerClient(target) as client:
            assert await client.is_model_ready("tiny")
            assert (await client.get_model_config("tiny")).config.model_transaction_policy.decoupled
            assert (await client.get_inference_statistics("tiny")).model_stats[0].name == "tiny"
            whole = _text([await client.infer("tiny", [_tensor()], parameters=_PLAIN)])
            found: dict[str, list[Any]] = {}
            errors = []
            async for result, error in client.stream_infer(_requests("a", "bad", "b")):
                if error is not None:
                    errors.append(str(error))
                else:
                    found.setdefault(result.get_response().id, []).append(result)
            assert {name: _text(results) for name, results in found.items()} == {"a": whole, "b": whole}
            assert len(errors) == 1 and "[request id: bad] max_tokens: " in errors[0]

    asyncio.run(ask())


def _refused(call: Any, *arguments: Any, says: str, status: str = _BAD, **options: Any) -> None:
    error = check_refused(lambda: call(*arguments, **options), InferenceServerException)
    assert says in error.message() and error.status() == status, error


@feature("errors")
def errors(target: str) -> None:
    with triton.InferenceServerClient(target) as client:
        _refused(client.infer, "tiny", [_tensor()], parameters={"max_tokens": 0}, says="max_tokens: ")
        _refused(client.infer, "tiny", [_tensor()], sequence_id=7, says="sequence_")
        _refused(client.infer, "nobody", [_tensor()], says="not found", status="StatusCode.NOT_FOUND")
        shared = triton.InferInput("text_input", [1], "BYTES")
        shared.set_shared_memory("region", 16)
        _refused(client.infer, "tiny", [shared], says="shared_memory_")
        classes = [triton.InferRequestedOutput("text_output", class_count=3)]
        _refused(client.infer, "tiny", [_tensor()], outputs=classes, says="classification")
        late = {"parameters": _LONG, "client_timeout": 0.2, "says": "", "status": "StatusCode.DEADLINE_EXCEEDED"}
        _refused(client.infer, "tiny", [_tensor()], **late)


@feature("errors")
def what_is_not_served(target: str) -> None:
    with triton.InferenceServerClient(target) as client:
        for call, arguments in (
            (client.load_model, ("tiny",)),
            (client.unload_model, ("tiny",)),
            (client.get_system_shared_memory_status, ()),
            (client.register_system_shared_memory, ("a", "/a", 16)),
            (client.unregister_system_shared_memory, ()),
            (client.get_cuda_shared_memory_status, ()),
            (client.register_cuda_shared_memory, ("a", b"YQ==", 0, 16)),
            (client.unregister_cuda_shared_memory, ()),
            (client.get_trace_settings, ()),
            (client.update_trace_settings, ("tiny",)),
            (client.get_log_settings, ()),
            (client.update_log_settings, ({},)),
        ):
            _refused(call, *arguments, says="is not implemented: ", status="StatusCode.UNIMPLEMENTED")


@feature("errors in a stream")
def errors_in_a_stream(target: str) -> None:
    """When its time is over, a request ends with that reason and the text so far."""
    with triton.InferenceServerClient(target) as client:
        stream = _Stream(client)
        stream.ask("a", parameters=_LONG, timeout=1_500_000)
        found, errors, _ = stream.read(1)
        client.stop_stream()
    assert not errors and _text(found["a"]) and found["a"][-1].as_numpy("finish_reason").tolist() == [b"timeout"]


@feature("leaving")
def leaving(target: str) -> None:
    with triton.InferenceServerClient(target) as client:

        def leave_a_stream() -> None:
            stream = _Stream(client)
            for name in "ab":
                stream.ask(name, parameters=_LONG)
            assert stream.arrived.get(timeout=_TIMEOUT_S)[1] is None
            client.stop_stream(cancel_requests=True)

        check_freed(leave_a_stream)

    async def leave() -> None:
        async with triton_aio.InferenceServerClient(target) as client:
            responses = client.stream_infer(_requests("c", max_tokens=900))
            await anext(responses)
            assert responses.cancel()

    check_freed(lambda: asyncio.run(leave()))


@feature("leaving")
def leaving_a_single_call(target: str) -> None:
    with triton.InferenceServerClient(target) as client:
        arrived: queue.Queue[Any] = queue.Queue()
        call = client.async_infer("tiny", [_tensor()], lambda result, error: arrived.put(error), parameters=_LONG)
        call.cancel()
        assert "ancelled" in str(arrived.get(timeout=_TIMEOUT_S))


@feature("tools, schemas, images")
def what_is_not_implemented(target: str) -> None:
    with triton.InferenceServerClient(target) as client:
        for name, value in NOT_IMPLEMENTED.items():
            _refused(client.infer, "tiny", _talk(), parameters={name: json.dumps(value)}, says=name)


main("tritonclient", "triton")
