"""What holds for every test of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny tensors only lose time to a second core, and a tenfold where another process has it.

    A test that loads a model has set the number to its host's. Some of these tests run where no torch is.
    """
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where our own compiled kernels are, or a skip."""
    from mlserver_torch_stream.engine.native.compile_kernels import NoKernels, compiled_library

    place = tmp_path_factory.mktemp("native")
    try:
        compiled_library(place, lambda _: None)
    except NoKernels as error:
        pytest.skip(f"no kernels here: {error}")
    return place
