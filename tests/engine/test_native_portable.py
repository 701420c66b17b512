"""The same kernels compiled for weaker CPUs than this one: without bfloat16 products or without 512-bit registers.

The compiler optimises little, which takes a fifth of the time; the vector instructions that the kernels name stay.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch

from mlserver_torch_stream.engine.attention.paged_attention import AttentionShape
from mlserver_torch_stream.engine.checks.attention import TOLERANCE, farthest
from mlserver_torch_stream.engine.native.compile_kernels import SOURCES
from mlserver_torch_stream.engine.native.kernel_library import VARIABLE, KernelOptions
from mlserver_torch_stream.engine.native.kernel_variants import VARIANTS, runnable
from mlserver_torch_stream.engine.native.native_attention import NativeAttention
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.prepacked_linear import pack_linears
from mlserver_torch_stream.engine.native.quantise import ROUNDED, round_weights
from mlserver_torch_stream.engine.native.structure import read_decoder
from tests.engine.argmax_check import check_argmax
from tests.engine.tiny import check_forward
from tests.engine.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

_OLD = "x86-64"  # of which no variant is compiled ahead
_COMPILER = f"""#!/bin/sh
for argument; do
    shift
    case $argument in
        -march=native) argument=-march={_OLD} ;;
        -O3) argument=-O1 ;;
    esac
    set -- "$@" "$argument"
done
exec c++ "$@"
"""
_NAMES = (*(variant.name for variant in VARIANTS), _OLD)


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="options of x86-64")
@pytest.mark.parametrize("more", [[], ["-mf16c"]], ids=["AVX", "AVX and F16C"])
def test_compilers_accept_the_kernels_for_cpus_with_avx_but_without_avx2(more: list[str]) -> None:
    options = ["-fsyntax-only", "-std=c++17", "-Wno-psabi", f"-march={_OLD}", "-mavx", "-mno-avx2", *more]
    made = subprocess.run(["c++", *options, str(SOURCES / "library.cpp")], capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", _NAMES)
def test_the_kernels_are_right_on_lesser_cpus(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = [variant.name for variant in runnable()]
    if name not in here and not (name == _OLD and platform.machine() == "x86_64"):
        pytest.skip(f"this CPU runs {', '.join(here) or 'no variant'}")
    compiler = tmp_path / "c++"
    compiler.write_text(_COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv(VARIABLE, "" if name == _OLD else name)
    models = [tiny_model(family, head_dim=20) for family in ("mixtral", "qwen3")]
    for dtype, model in product((torch.float32, torch.bfloat16), models):
        model = model.to(dtype)
        with torch.inference_mode():
            forward = NativeForward(model, KernelOptions(2, tmp_path))
            assert forward.variant == ("compiled for this CPU" if name == _OLD else f"{name}, compiled here")
            assert check_forward(model, forward) is None
            check_argmax(model, forward)
    with torch.inference_mode():
        forward = NativeForward(model, KernelOptions(2, tmp_path), ROUNDED["int8"])
        round_weights(read_decoder(model), ROUNDED["int8"])
        assert check_forward(model, forward) is None
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model("gpt_neox", intermediate_size=600).to(dtype)  # wide enough for two threads
        with torch.inference_mode():
            assert pack_linears(model, KernelOptions(2, tmp_path)), "the check of the packed layers fails"
    native = NativeAttention(tmp_path)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for shape in (AttentionShape(4, 2, 20, 12, dtype, 0.2, 40), AttentionShape(8, 1, 5, 7, dtype, 0.2)):
            assert farthest(native, shape) < TOLERANCE[dtype]
