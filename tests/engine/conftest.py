"""The fixtures of all tests of the engine. Imports no torch, since some of these tests run where torch is not
installed.

A test that needs another model than the fixture ``model`` builds it, or overrides the fixture.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mlserver_torch_stream.engine.text.tokenizer import TextCodec
    from tests.engine.tiny import Watch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Sets torch to one thread: a second core only slows down tiny tensors, tenfold if another process uses it.

    A test that loads a model may have set the number to that of its host.
    """
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A tiny random Llama."""
    from tests.engine.tiny import tiny_model

    return tiny_model("llama")


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    """The codec of a tokenizer with one token for each byte."""
    from mlserver_torch_stream.engine.text.tokenizer import TextCodec
    from tests.engine.tiny_models import byte_tokenizer

    return TextCodec(byte_tokenizer())


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that does not run, for tests that need mailboxes but do not read them."""
    with closing(asyncio.new_event_loop()) as loop:
        yield loop


@pytest.fixture
def watch(model: PreTrainedModel) -> Iterator[Watch]:
    """Records every forward of ``model``."""
    from tests.engine.tiny import watched

    with watched(model) as watch:
        yield watch


@pytest.fixture(scope="session")
def folder(kernel_cache: Path) -> Path:
    """The folder of the compiled kernels; the test is skipped if they cannot be compiled here."""
    from mlserver_torch_stream.engine.native.compile_kernels import NoKernels, compiled_library

    try:
        compiled_library(kernel_cache, Path.exists)
    except NoKernels as error:
        pytest.skip(f"no kernels here: {error}")
    return kernel_cache
