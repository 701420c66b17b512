"""The script for GPUs refuses by name where there is none; its page names its checks."""

import subprocess
import sys

import pytest
import torch

from benchmarks.gpu import CHECKS
from tests import markdown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu"], capture_output=True, text=True, cwd=markdown.ROOT)
    assert done.returncode == 2 and "no CUDA device here" in done.stderr


def test_the_page_explains_every_check() -> None:
    rows = markdown.table("docs/gpu.md", "On GPUs")
    assert [name.strip("`") for name, _ in rows] == list(CHECKS)
