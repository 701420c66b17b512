"""What holds for every test of the engine."""

from __future__ import annotations

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
