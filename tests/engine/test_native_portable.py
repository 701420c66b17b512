"""The same kernels compiled for lesser CPUs than this one: without bf16 products, without 512-bit registers.

The compiler optimises little, which takes a fifth of the time; the vector instructions that the kernels name stay.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest
import torch

from mlserver_torch_stream.engine.loading.selfcheck import check_forward
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.quantise import round_weights
from mlserver_torch_stream.engine.native.structure import read_decoder
from tests.engine.tiny import tiny_model

pytestmark = [
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are x86's"),
]


_COMPILER = """#!/bin/sh
for argument; do
    shift
    case $argument in
        -march=native) argument=-march=CPU ;;
        -O3) argument=-O1 ;;
    esac
    set -- "$@" "$argument"
done
exec c++ "$@"
"""


@pytest.mark.parametrize(
    "cpu", ["x86-64-v3", *(pytest.param(cpu, marks=pytest.mark.slow) for cpu in ("x86-64", "x86-64-v4"))]
)
def test_the_kernels_are_right_on_lesser_cpus(cpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {"x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}.get(cpu, "")
    if needed not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this CPU has no {needed}")
    compiler = tmp_path / "c++"
    compiler.write_text(_COMPILER.replace("CPU", cpu))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model("qwen3", head_dim=20).to(dtype)
        with torch.inference_mode():
            assert check_forward(model, NativeForward(model, 2, tmp_path)) is None
    with torch.inference_mode():
        forward = NativeForward(model, 2, tmp_path, int8=True)
        round_weights(read_decoder(model))
        assert check_forward(model, forward) is None
