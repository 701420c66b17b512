"""What Triton's own client does against a server, as programs for processes of their own.

The messages of that client have the names of MLServer's. Each program takes the address of a port, and prints ``done``
if all that it asks for holds.
"""

from __future__ import annotations

_HEAD = """
import asyncio
import queue
import sys

import numpy as np
from tritonclient.utils import InferenceServerException

LONG = {"max_tokens": 900, "ignore_eos": True}


def prompt(text="Hello fox"):
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    return [tensor]


def text_of(results):
    return "".join(result.as_numpy("text_output")[0].decode() for result in results)


def refused(call, *arguments, says, status=None, **options):
    try:
        call(*arguments, **options)
    except InferenceServerException as error:
        assert says in error.message(), error
        assert status in (None, error.status()), error.status()
    else:
        raise AssertionError(f"{call.__name__} is not refused")
"""

GRPC = f"""
import tritonclient.grpc as triton
{_HEAD}
PLAIN = {{"max_tokens": 20, "ignore_eos": True}}
client = triton.InferenceServerClient(sys.argv[1])

# Health and metadata.
assert client.is_server_live() and client.is_server_ready()
assert client.is_model_ready("tiny") and client.is_model_ready("tiny", "v1") and not client.is_model_ready("nobody")
assert client.get_server_metadata().name == "mlserver"
assert "text_input" in [tensor.name for tensor in client.get_model_metadata("tiny").inputs]
config = client.get_model_config("tiny").config
assert config.model_transaction_policy.decoupled and config.max_batch_size == 0
assert {{tensor.name: tensor.data_type for tensor in config.input}}["text_input"] == 13  # TYPE_STRING
assert client.get_model_config("tiny", as_json=True)["config"]["input"][0]["data_type"] == "TYPE_STRING"
index = {{model.name: model.state for model in client.get_model_repository_index().models}}
assert index["tiny"] == "READY"

# Unary: outputs of numbers too, compression, statistics, a chosen output, errors.
before = client.get_inference_statistics("tiny").model_stats[0].inference_count
result = client.infer("tiny", prompt(), request_id="mine", parameters=PLAIN)
assert result.get_response().id == "mine" and result.as_numpy("num_output_tokens").tolist() == [20]
whole = text_of([result])
for coding in ("gzip", "deflate"):
    chosen = [triton.InferRequestedOutput("text_output")]
    options = {{"temperature": 0.0, **PLAIN}}
    again = client.infer("tiny", prompt(), outputs=chosen, compression_algorithm=coding, parameters=options, priority=1)
    assert text_of([again]) == whole and again.as_numpy("finish_reason") is None
assert client.get_inference_statistics("tiny").model_stats[0].inference_count == before + 3
assert {{each.name for each in client.get_inference_statistics().model_stats}} == {{"tiny", "other", "narrow"}}
bad = "StatusCode.INVALID_ARGUMENT"
refused(client.infer, "tiny", prompt(), parameters={{"max_tokens": 0}}, says="max_tokens: ", status=bad)
refused(client.infer, "tiny", prompt(), sequence_id=7, says="sequence_", status=bad)
refused(client.infer, "nobody", prompt(), says="not found", status="StatusCode.NOT_FOUND")
shared = triton.InferInput("text_input", [1], "BYTES")
shared.set_shared_memory("region", 16)
refused(client.infer, "tiny", [shared], says="shared_memory_", status=bad)
classes = [triton.InferRequestedOutput("text_output", class_count=3)]
refused(client.infer, "tiny", prompt(), outputs=classes, says="classification", status=bad)
late = "StatusCode.DEADLINE_EXCEEDED"
refused(client.infer, "tiny", prompt(), parameters=LONG, client_timeout=0.2, says="", status=late)

# What is not served.
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
    (client.update_log_settings, ({{}},)),
):
    refused(call, *arguments, says="is not implemented: ", status="StatusCode.UNIMPLEMENTED")

# A stream with several requests at the same time, one of them wrong.
arrived = queue.Queue()
client.start_stream(callback=lambda result, error: arrived.put((result, error)))
for name in ("a", "bad", "b", "c"):
    options = {{**PLAIN, "temperature": 0.0}} if name != "bad" else {{"temperature": "warm"}}
    wanted = name == "c"
    client.async_stream_infer(
        "tiny", prompt(), request_id=name, parameters=options, enable_empty_final_response=wanted
    )
found, errors, order = {{}}, [], []
finals = set()
while len(finals) + len(errors) < 4:
    result, error = arrived.get(timeout=60)
    if error is not None:
        errors.append(str(error))
        continue
    response = result.get_response()
    order.append(response.id)
    found.setdefault(response.id, []).append(result)
    if response.parameters["triton_final_response"].bool_param:
        finals.add(response.id)
assert finals == {{"a", "b", "c"}} and all(text_of(found[name]) == whole for name in finals)
assert order.index("c") < len(order) - 1 - order[::-1].index("a"), "they run one after another"
(error,) = errors
assert "[request id: bad] temperature: " in error

# The same stream goes on after the error, and ends when its client stops it.
client.async_stream_infer("other", prompt(), request_id="d", parameters=PLAIN)
client.stop_stream()
rest = [arrived.get_nowait() for _ in range(arrived.qsize())]
assert all(error is None for _, error in rest) and text_of([result for result, _ in rest]) == whole

# A stream that its client cancels.
arrived = queue.Queue()
client.start_stream(callback=lambda result, error: arrived.put((result, error)))
for name in "ab":
    client.async_stream_infer("tiny", prompt(), request_id=name, parameters=LONG)
assert arrived.get(timeout=60)[1] is None
client.stop_stream(cancel_requests=True)

# A single call that its client cancels.
arrived = queue.Queue()
call = client.async_infer("other", prompt(), lambda result, error: arrived.put(error), parameters=LONG)
call.cancel()
assert "ancelled" in str(arrived.get(timeout=60))
client.close()
print("done")
"""

GRPC_AIO = f"""
import tritonclient.grpc.aio as triton
{_HEAD}
PLAIN = {{"max_tokens": 20, "ignore_eos": True}}


async def requests(*names, **options):
    for name in names:
        parameters = {{**PLAIN, **options}} if name != "bad" else {{"max_tokens": -1}}
        yield {{"model_name": "tiny", "inputs": prompt(), "request_id": name, "parameters": parameters}}


async def main():
    async with triton.InferenceServerClient(sys.argv[1]) as client:
        assert await client.is_server_ready() and await client.is_model_ready("tiny")
        assert (await client.get_model_config("tiny")).config.model_transaction_policy.decoupled
        assert (await client.get_inference_statistics("tiny")).model_stats[0].name == "tiny"
        whole = text_of([await client.infer("tiny", prompt(), parameters=PLAIN)])
        found, errors = {{}}, []
        async for result, error in client.stream_infer(requests("a", "bad", "b")):
            if error is not None:
                errors.append(str(error))
            else:
                found.setdefault(result.get_response().id, []).append(result)
        assert {{name: text_of(results) for name, results in found.items()}} == {{"a": whole, "b": whole}}
        assert len(errors) == 1 and "[request id: bad] max_tokens: " in errors[0]
        responses = client.stream_infer(requests("c", max_tokens=900))
        await anext(responses)
        assert responses.cancel()


asyncio.run(main())
print("done")
"""

HTTP = f"""
import tritonclient.http as triton
{_HEAD}
PLAIN = {{"max_tokens": 20, "ignore_eos": True}}
client = triton.InferenceServerClient(sys.argv[1])
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("tiny")
assert not client.is_model_ready("nobody")
assert client.get_server_metadata()["name"] == "mlserver"
assert client.get_model_metadata("tiny")["name"] == "tiny"
assert client.get_model_config("tiny", "v1")["model_transaction_policy"] == {{"decoupled": True}}
before = client.get_inference_statistics("tiny")["model_stats"][0]
result = client.infer("tiny", prompt(), request_id="mine", parameters=PLAIN)
assert result.get_response()["id"] == "mine" and result.as_numpy("num_output_tokens").tolist() == [20]
after = client.get_inference_statistics("tiny", "v1")["model_stats"][0]
assert after["inference_count"] == before["inference_count"] + 1
assert after["inference_stats"]["success"]["ns"] > before["inference_stats"]["success"]["ns"]
assert len(client.get_inference_statistics()["model_stats"]) == 3
assert {{model["name"]: model["state"] for model in client.get_model_repository_index()}}["tiny"] == "READY"
refused(client.get_model_config, "nobody", says="not found", status="404")
refused(client.infer, "tiny", prompt(), sequence_id=7, says="sequence_", status="422")
client.close()
print("done")
"""

HTTP_AIO = f"""
import tritonclient.http.aio as triton
{_HEAD}


async def main():
    async with triton.InferenceServerClient(sys.argv[1]) as client:
        assert await client.is_server_ready() and await client.is_model_ready("tiny")
        assert (await client.get_model_config("tiny"))["model_transaction_policy"] == {{"decoupled": True}}
        assert (await client.get_inference_statistics("tiny"))["model_stats"][0]["name"] == "tiny"
        result = await client.infer("tiny", prompt(), parameters={{"max_tokens": 3, "ignore_eos": True}})
        assert result.as_numpy("num_output_tokens").tolist() == [3]


asyncio.run(main())
print("done")
"""
