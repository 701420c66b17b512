"""What several folders of tests share. Imports no torch, since some of these folders run without it.

A fixture that needs torch imports it when it is used.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# `make test` and CI try the same examples each time; `make test-all` tries new ones, and more of them.
# No example has a deadline, because other work may delay it.
settings.register_profile("fixed", derandomize=True, max_examples=50, deadline=None)
settings.register_profile("random", derandomize=False, deadline=None)
settings.load_profile("fixed")

# What is imported and collected is never garbage: looking through it again and again takes seconds of each process.
gc.disable()

# The servers of these tests share the machine's cores with the tests: threads that wait must not keep a core busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts a script's background jobs with SIGINT ignored, and the programs that tests start would inherit that:
# Ctrl-C would stop none of them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "A model streams its answer token by token.",
    "Grüße aus Köln, mit Umlauten und einem Euro: 5 €.",
    "日本語のテキストも少し。 Emoji: 🙂🚀",
    "Numbers 0 1 2 3 4 5 6 7 8 9 and brackets () [] {}.",
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TINY_VOCAB = 400
TINY_CONTEXT = 1024
_ROOMS_OF_SERVERS = ("batches", "reliability", "server")  # share servers: each process would start its own
# Files of 8 s and more, which start servers, compile or wait. The processes end together if the last files are short
# ones.
_LONG_FILES = (
    "deploy/test_serving",
    "engine/test_native_portable",
    "test_readme",
    "torchserve/test_server",
    "engine/test_tensor_parallel",
    "engine/test_watchdog",
    "engine/test_pages_families",
    "engine/test_engine_batches",
    "engine/test_gguf_originals",
    "engine/test_native_attention",
    "torchserve/test_bad_handlers",
    "engine/test_vllm",
    "engine/test_native",
    "torchserve/test_scaling",
    "engine/test_pipeline",
    "engine/test_record",
    "engine/test_engine_faults",
    "cloud/test_watch",
    "cloud/test_command",
    "cloud/test_predictions",
    "torchserve/test_grpc_predictions",
    "torchserve/test_sent_ahead",
    "engine/test_native_int8",
    "cloud/test_mlserver",
    "bench/test_client",
    "test_loading",
    "engine/test_replicas",
    "torchserve/test_management",
    "cli/test_chat",
    "engine/test_selfcheck",
    "engine/test_families",
    "engine/test_generation",
    "engine/test_text_overlap",
    "engine/test_engine_time",
)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """If tests run in several processes, those that share servers or a module's fixtures run in the same one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByRoom(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    config.option.loadscopereorder = False  # the order is that of the tests, below
    return ByRoom(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In several processes, the longest tests begin first: folders with servers, long files, files with many tests."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    tests = Counter(_scope(item.nodeid) for item in items)

    def place(item: pytest.Item) -> tuple[bool, int, int, str]:
        scope = _scope(item.nodeid)
        file = scope.removeprefix("tests/").removesuffix(".py")
        longest = _LONG_FILES.index(file) if file in _LONG_FILES else len(_LONG_FILES)
        return scope not in _ROOMS_OF_SERVERS, longest, -tests[scope], scope

    items.sort(key=place)


def _scope(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    room = file.split("/")[1]
    return room if room in _ROOMS_OF_SERVERS else file


@pytest.fixture(scope="session")
def kernel_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder for all processes of this run, with our kernels if there is a compiler.

    The compiler runs once, or not at all if an earlier run of these tests has compiled the same sources.
    """
    from filelock import FileLock

    from mlserver_torch_stream.engine.native.compile_kernels import NoKernels, compiled_library

    folder = _of_all_processes(tmp_path_factory) / "kernel-cache"
    folder.mkdir(exist_ok=True)
    kept, kernels = request.config.cache.mkdir("kernels"), folder / "kernels"
    with FileLock(folder / "compiling"):
        if not kernels.exists():
            shutil.copytree(kept, kernels)
            earlier = {(path.name, path.stat().st_size) for path in kept.iterdir()}
            with suppress(NoKernels):
                compiled_library(folder, Path.exists)
            compiled = {(path.name, path.stat().st_size) for path in kernels.iterdir()} - earlier
            if compiled:
                for name in {name for name, _ in earlier} - {name for name, _ in compiled}:
                    (kernels / name).unlink(missing_ok=True)
                shutil.rmtree(kept)
                shutil.copytree(kernels, kept)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama in float32, with two layers, its own byte-level tokenizer, and a chat template.

    All processes of a run share it. So the first server checks its kernels, and the others find the record of that
    check.
    """
    pytest.importorskip("torch")  # the torch-free rooms run without it, and their few tests of engines are skipped
    from filelock import FileLock

    folder = _of_all_processes(tmp_path_factory) / "tiny-llama"
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            _save_tokenizer(folder)
            _save_model(folder)
    return folder


def _of_all_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder that the processes of a run have in common."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _save_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=TINY_VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TINY_CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
