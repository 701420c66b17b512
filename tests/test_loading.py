"""Loading a model: which errors are found, and what is logged; the engine is a real one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece

from mlserver_torch_stream.engine.loading.model_files import ModelFiles
from mlserver_torch_stream.engine.loading.tokenizer_files import load_tokenizer
from mlserver_torch_stream.engine.shared_pool import PROCESS
from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.loading import build
from mlserver_torch_stream.settings import parse_settings


def test_a_bad_default_sampling_fails_the_load_in_one_line_and_leaves_nothing_behind(tiny_model: Path) -> None:
    resolved = parse_settings(str(tiny_model), {"default_sampling": {"top_p": 7}, "fast_path": "off"}, environ={})
    before = (len(PROCESS.engines), len(PROCESS.weights))
    with pytest.raises(SettingsError, match=r"^default_sampling: top_p: must be [^\n]*, got 7 \([^\n]*\)$"):
        build(resolved, "owner", lambda error: None)
    assert (len(PROCESS.engines), len(PROCESS.weights)) == before


_COLLECTED = """
import gc, sys
from concurrent.futures import ThreadPoolExecutor
from mlserver_torch_stream.loading import _OWN_CODE, _engine_builder, build
from mlserver_torch_stream.settings import parse_settings

with ThreadPoolExecutor(2) as pool:  # two models at the same time, each of which makes something then
    made = list(pool.map(lambda _: [_engine_builder(_OWN_CODE)], range(2)))
seen = all(any(each is found for found in gc.get_objects()) for each in made)
engines = [build(parse_settings(sys.argv[1], {"fast_path": "off"}, environ={}), n, print) for n in "ab"]
gc.collect()
print(gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects()), "torch" in sys.modules, seen)
for built in engines:
    built.give_back()
    built.shutdown()
"""


@pytest.mark.slow
def test_a_garbage_collection_does_not_walk_what_torch_and_transformers_brought(tiny_model: Path) -> None:
    """Runs in a separate process, as these modules are already imported here."""
    run = [sys.executable, "-c", _COLLECTED, str(tiny_model)]
    told = subprocess.run(run, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()[-1].split()
    assert told[0] == told[3] == "True"
    assert told[4] == "True", "what a model is made of must be garbage one day"
    assert int(told[1]) > 5 * int(told[2]) > 0


def test_what_was_set_is_told_with_its_place(tmp_path: Path) -> None:
    file = {"implementation": "x", "parameters": {"extra": {"max_queued_requests": 7, "threads": 1}}}
    (tmp_path / "model-settings.json").write_text(json.dumps(file))
    environ = {"MLSERVER_MODEL_EXTRA": json.dumps({"dtype": "float32"}), "MLSERVER_TORCH_STREAM_CACHE": "/var/cache"}
    extra = {"max_queued_requests": 7, "threads": 1, "dtype": "float32", "chat_template": "{{ messages }}" * 100}
    summary = parse_settings("embedded://x", extra, None, str(tmp_path), environ).summary
    assert "; model-settings.json: max_queued_requests=7, threads=1" in summary.replace(
        "threads=1, max_queued_requests=7", ""
    )
    assert "; MLSERVER_MODEL_EXTRA: dtype='float32'" in summary
    assert "; MLSERVER_TORCH_STREAM_CACHE: cache_dir='/var/cache'" in summary
    assert len(summary) < 300 and "\n" not in summary and "chunked_prefill_size" not in summary


def test_a_model_that_brings_only_a_sentencepiece_file_has_a_tokenizer(tmp_path: Path) -> None:
    text, folder = tmp_path / "text.txt", tmp_path / "model"
    folder.mkdir()
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=60, model_type="bpe", minloglevel=2
    )
    (folder / "tokenizer.vocab").unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    tokenizer = load_tokenizer(ModelFiles(str(folder), None), parse_settings(str(folder), {}, environ={}))
    assert tokenizer.decode(tokenizer("The lazy fox")["input_ids"]) == "The lazy fox"


def test_a_chat_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match=r"parameters\.extra\.chat_template: cannot read .*template\.jinja"):
        parse_settings("embedded://x", {"chat_template": "template.jinja"}, source_folder=str(tmp_path), environ={})
