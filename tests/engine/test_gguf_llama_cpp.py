"""Files that llama.cpp has converted and quantised give the tokens and the logits that llama.cpp computes from them.

``make test-gguf`` builds llama.cpp and runs these tests; otherwise ``LLAMA_CPP_BIN`` names the folder of its programs.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from mlserver_torch_stream.engine.checks.decoder_check import verify_kernels
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.config_fields import settle_positions
from mlserver_torch_stream.engine.loading.gguf_packed import load_packed, write_packed
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.structure import read_decoder
from tests.engine.convert_hf import CONVERTER, IS_THERE, convert
from tests.engine.gguf_originals import CONTEXT, ORIGINALS, YARN, make_original
from tests.engine.page_book import PageBook
from tests.engine.test_gguf_originals import PROMPT, WITHOUT_KERNELS
from tests.engine.tiny_gguf import TOKENS
from tests.server.harness import free_ports

PROGRAMS = Path(os.environ.get("LLAMA_CPP_BIN", CONVERTER / "build" / "bin"))
KINDS = ("Q4_0", "Q4_1", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
NAMES = [name for name in ORIGINALS if name not in (*WITHOUT_KERNELS, "mixtral", "qwen3 with experts")]
_ANSWER = 12  # tokens
# Those that are text alone: llama.cpp shows no probabilities of a token that ends within a character.
_TEXT = [number for number, token in enumerate(TOKENS) if token.isascii() and not token.startswith("<|")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (IS_THERE and (PROGRAMS / "llama-server").is_file()),
        reason="LLAMA_CPP and LLAMA_CPP_BIN name no converter and no llama-server; make test-gguf builds them",
    ),
]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``NAME/f32.gguf`` for each model, whose rows are long enough for K-quants."""
    return convert({name: _model(name) for name in NAMES}, tmp_path_factory.mktemp("converted"), ("f32",))


def _model(name: str) -> Any:
    own = ORIGINALS[name][1]
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
    sizes |= {key: 64 for key in ("head_dim", "query_pre_attn_scalar") if key in own}
    if name == "phi3":
        sizes["sliding_window"] = CONTEXT  # llama.cpp does not support the family's windows
    if name == "phi3, long":
        sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8}  # of as many dimensions as there are factors
    if name.endswith("yarn"):
        sizes["rope_parameters"] = YARN  # llama.cpp does not read the keys of yarn's other parameters
    model = make_original(name, **sizes)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5 if weight.dim() > 1 else 1.0)  # attention that is not all on one token
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_quantised_file_gives_llama_cpp_s_tokens(
    name: str, kind: str, converted: Path, tmp_path: Path, folder: Path
) -> None:
    """Both round activations to eight bits, in groups of different sizes, so their logits differ a little."""
    file = tmp_path / "m.gguf"
    _run("llama-quantize", str(converted / name / "f32.gguf"), str(file), kind)
    tokens, expected = _greedy_by_llama_cpp(file, tmp_path)
    write_packed(file, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    settle_positions(config, CONTEXT)
    model = load_packed(tmp_path, file, config).model
    with torch.inference_mode():
        forward, findings = verify_kernels(
            ExpectedLogits(model, torch.int8), read_decoder(model), KernelOptions(1, folder)
        )
        ids = [*PROMPT, *tokens[:-1]]
        got = PageBook(model, pages=8).step(forward, {"row": ids}, _ANSWER)["row"].float().log_softmax(-1)
    assert findings.problem is None
    spread = expected.std(-1).mean()
    assert (got - expected).pow(2).mean().sqrt() < 0.15 * spread  # another yarn: 0.2 and more
    chosen = got.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert (got[:, _TEXT].amax(-1) - chosen < 0.5 * spread).all()


def _greedy_by_llama_cpp(file: Path, place: Path) -> tuple[list[int], torch.Tensor]:
    """Returns the tokens of ``_TEXT`` that follow the prompt, and the logarithms of all tokens' probabilities there."""
    asked = {
        "prompt": PROMPT, "n_predict": _ANSWER, "temperature": 0, "n_probs": len(TOKENS), "return_tokens": True,
        "logit_bias": [[number, False] for number in range(len(TOKENS)) if number not in _TEXT],
    }  # fmt: skip
    for url in _server(file, place):
        answer = _ask(f"{url}/completion", asked)
        logarithms = torch.full((_ANSWER, len(TOKENS)), float("nan"))
        for row, step in zip(logarithms, answer["completion_probabilities"], strict=True):
            for each in step["top_logprobs"]:
                row[each["id"]] = each["logprob"]
    assert not logarithms.isnan().any()
    return answer["tokens"], logarithms


def _server(file: Path, place: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    # llama.cpp looks for certain tokens in a model that is called phi3.
    options = ["-c", str(CONTEXT), "-np", "1", "-t", "1", "--no-warmup", "--override-kv", "general.name=str:tiny"]
    command = [str(PROGRAMS / "llama-server"), "-m", str(file), "--port", str(port), *options]
    with (place / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not _is_ready(f"http://127.0.0.1:{port}"):
            assert process.poll() is None and time.monotonic() < deadline, (place / "server.log").read_text()[-3000:]
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return bool(_ask(f"{url}/health")["status"] == "ok")
    except OSError:
        return False


def _ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def _run(program: str, *arguments: str) -> None:
    run = subprocess.run([str(PROGRAMS / program), *arguments], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
