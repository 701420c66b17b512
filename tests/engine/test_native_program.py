"""The kernels in a program without Python: under sanitizers, and on an emulator of another CPU."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlserver_torch_stream.engine.native.compile_kernels import SOURCES
from mlserver_torch_stream.engine.native.kernel_variants import VARIANTS, KernelVariant, runnable

PROGRAM = Path(__file__).parent / "native_program" / "main.cpp"
_FLAGS = ("-O1", "-g", "-std=c++17", "-ffp-contract=fast", "-Wno-psabi", "-pthread", f"-I{SOURCES}")
_ENDS = "steps are right, also without memory\n"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")]


def run(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds)


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_no_sanitizer_finds_anything_and_all_is_right(variant: KernelVariant, sanitizers: str, tmp_path: Path) -> None:
    """Products and attention equal plain loops, bits do not depend on other rows, and short memory is handled."""
    if variant not in runnable():
        pytest.skip(f"this CPU does not run {variant.name}")
    program = tmp_path / "program"
    options = (*_FLAGS, *variant.options, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")
    made = run(["c++", *options, str(PROGRAM), "-o", str(program)], 900)
    assert made.returncode == 0, made.stderr[-2000:]
    found = run([str(program)], 900)
    assert found.returncode == 0 and found.stdout.endswith(_ENDS), found.stdout + found.stderr[-4000:]


@pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="no qemu-aarch64")
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed")
def test_the_kernels_for_aarch64_are_right_in_an_emulator(tmp_path: Path) -> None:
    (neon,) = (variant for variant in VARIANTS if variant.machine == "aarch64")
    program = tmp_path / "program"
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl", f"-mcpu={neon.zig_cpu}"]
    made = run([*compiler, *_FLAGS, "-static", str(PROGRAM), "-o", str(program)], 900)
    assert made.returncode == 0, made.stderr[-2000:]
    found = run(["qemu-aarch64", str(program)], 900)
    assert found.returncode == 0 and found.stdout.endswith(_ENDS), found.stdout + found.stderr[-4000:]
