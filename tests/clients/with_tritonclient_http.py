"""Features of Triton's own client over HTTP, with threads and with asyncio.

Knows nothing of the server beyond what ``features`` says.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from features import NOT_IMPLEMENTED, QUESTION, check_refused, feature, main
from tritonclient.utils import InferenceServerException

_PLAIN: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}


def _client(url: str) -> Any:
    return triton.InferenceServerClient(url.removeprefix("http://"))


def _tensor(name: str = "text_input", value: str = "Hello fox", *, raw: bool = True) -> Any:
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], dtype=np.object_), binary_data=raw)
    return tensor


def _text(result: Any) -> str:
    (text,) = result.as_numpy("text_output")
    return str(text.decode() if isinstance(text, bytes) else text)


def _infer(url: str, *inputs: Any, **options: Any) -> Any:
    with _client(url) as client:
        return client.infer("tiny", list(inputs) or [_tensor()], **{"parameters": _PLAIN, **options})


@feature("models")
def models(url: str) -> None:
    with _client(url) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("tiny") and not client.is_model_ready("nobody")
        assert client.get_server_metadata()["name"] == "mlserver"
        assert client.get_model_metadata("tiny")["name"] == "tiny"
        assert client.get_model_config("tiny")["model_transaction_policy"] == {"decoupled": True}
        index = {model["name"]: model["state"] for model in client.get_model_repository_index()}
        assert index["tiny"] == "READY"
        before = client.get_inference_statistics("tiny")["model_stats"][0]
        client.infer("tiny", [_tensor()], parameters=_PLAIN)
        after = client.get_inference_statistics("tiny")["model_stats"][0]
        assert after["inference_count"] == before["inference_count"] + 1
        assert after["inference_stats"]["success"]["ns"] > before["inference_stats"]["success"]["ns"]
        assert len(client.get_inference_statistics()["model_stats"]) >= 2


@feature("chat")
def chat(url: str) -> None:
    assert _text(_infer(url, _tensor("messages", json.dumps(QUESTION))))


@feature("prompts")
def prompts(url: str) -> None:
    result = _infer(url, request_id="mine")
    assert result.get_response()["id"] == "mine" and result.as_numpy("num_output_tokens").tolist() == [20]
    assert _text(result)


@feature("log-probabilities")
def logprobs(url: str) -> None:
    result = _infer(url, parameters={**_PLAIN, "return_logprobs": True, "top_logprobs": 2})
    entries = json.loads(result.as_numpy("logprobs")[0])
    assert len(entries) == 20 and all(len(entry["top"]) == 2 for entry in entries)


@feature("parameters")
def parameters(url: str) -> None:
    """Tests tensors as raw bytes and as JSON in both directions, gzip, a chosen output, and priority and timeout."""
    whole = _text(_infer(url))
    for raw in (True, False):
        chosen = [triton.InferRequestedOutput("text_output", binary_data=raw)]
        options = {"parameters": {"temperature": 0.0, **_PLAIN}, "priority": 1, "timeout": 60_000_000}
        packed = {"request_compression_algorithm": "gzip", "response_compression_algorithm": "gzip"}
        again = _infer(url, _tensor(raw=raw), outputs=chosen, **options, **packed)
        assert _text(again) == whole and again.as_numpy("finish_reason") is None


@feature("asyncio")
def asynchronous(url: str) -> None:
    async def ask() -> str:
        async with triton_aio.InferenceServerClient(url.removeprefix("http://")) as client:
            assert await client.is_model_ready("tiny")
            assert (await client.get_model_config("tiny"))["model_transaction_policy"] == {"decoupled": True}
            assert (await client.get_inference_statistics("tiny"))["model_stats"][0]["name"] == "tiny"
            return _text(await client.infer("tiny", [_tensor()], parameters=_PLAIN))

    assert asyncio.run(ask()) == _text(_infer(url))


@feature("errors")
def errors(url: str) -> None:
    with _client(url) as client:
        for call, options, status, said in (
            (client.get_model_config, {"model_name": "nobody"}, "404", "not found"),
            (client.infer, {"model_name": "nobody", "inputs": [_tensor()]}, "404", "not found"),
            (client.infer, {"model_name": "tiny", "inputs": [_tensor()], "sequence_id": 7}, "422", "sequence_"),
            (client.infer, {"model_name": "tiny", "inputs": [_tensor()], "parameters": {"n": 0}}, "422", "n: "),
        ):
            error = check_refused(lambda call=call, options=options: call(**options), InferenceServerException, said)
            assert error.status() == status, error


@feature("tools, schemas, images")
def what_is_not_implemented(url: str) -> None:
    for name, value in NOT_IMPLEMENTED.items():
        asked = {"parameters": {name: json.dumps(value)}}
        check_refused(lambda asked=asked: _infer(url, **asked), InferenceServerException, name)


main("tritonclient", "rest")
