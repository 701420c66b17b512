"""Puts kernels that are compiled ahead of time into a wheel, one library for each set of instructions.

To have them, set WHEEL_MACHINE to x86_64 or aarch64. Otherwise the wheel has no kernels: it installs on any machine,
and the kernels are compiled at the first start. The compiler is that of the package ziglang: it also compiles for other
machines, and for glibc 2.28, so that the wheel is a manylinux_2_28 one.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_ROOM = Path("mlserver_torch_stream/engine/native")
_GLIBC = "2.28"
# Without -mprefer-vector-width clang splits the kernels' vectors of 512 bits in two.
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-Wno-psabi", "-shared", "-fPIC", "-pthread", "-Wl,-s")
_WIDE = "-mprefer-vector-width=512"


class KernelsHook(BuildHookInterface[Any]):
    """Compiles the variants of ``kernel_variants`` for the machine that WHEEL_MACHINE names."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        machine = os.environ.get("WHEEL_MACHINE", "")
        if version == "editable" or not machine:
            return
        all_variants = _variants(Path(self.root))
        variants = [variant for variant in all_variants if variant.machine == machine]
        if not variants:
            machines = sorted({variant.machine for variant in all_variants})
            raise SystemExit(f"WHEEL_MACHINE: must be {' or '.join(machines)}, got {machine!r}")
        folder = Path(self.root) / "build" / "prebuilt"
        folder.mkdir(parents=True, exist_ok=True)
        for number, variant in enumerate(variants, start=1):
            print(
                f"Compiling the kernels for {machine} with {variant.name}, {number} of {len(variants)}; the first takes"
                " minutes, because the compiler compiles its own C++ library too",
                flush=True,
            )
            _compile(Path(self.root), variant, folder / variant.file_name)
            inside = _ROOM / "prebuilt" / variant.file_name
            build_data["force_include"][str(folder / variant.file_name)] = str(inside)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{_GLIBC.replace('.', '_')}_{machine}"


def _variants(root: Path) -> Sequence[Any]:
    """Reads the table of variants without the package, whose dependencies a build does not have."""
    spec = importlib.util.spec_from_file_location("kernel_variants", root / _ROOM / "kernel_variants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.VARIANTS


def _compile(root: Path, variant: Any, library: Path) -> None:
    target = ("-target", f"{variant.machine}-linux-gnu.{_GLIBC}", f"-mcpu={variant.zig_cpu}")
    wide = (_WIDE,) if variant.machine == "x86_64" else ()
    source = root / _ROOM / "kernels" / "library.cpp"
    zig = (sys.executable, "-m", "ziglang", "c++")
    subprocess.run([*zig, *target, *_FLAGS, *wide, str(source), "-o", str(library)], check=True)
