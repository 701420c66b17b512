"""Lists the CPU instruction sets for which wheels have compiled kernels, and finds the sets that this CPU can run.

This module imports only the standard library, because the build of a wheel uses the file without the package.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One set of CPU instructions, such as AVX512 with bf16, that the kernels are compiled for.

    ``flags`` are the names in /proc/cpuinfo that a CPU must have. ``options`` are the options of GCC and clang.
    ``zig_cpu`` is the equivalent option of zig, which compiles the libraries of wheels.
    """

    name: str
    machine: str
    flags: frozenset[str]
    options: tuple[str, ...]
    zig_cpu: str

    @property
    def file_name(self) -> str:
        return f"decoder-{self.machine}-{self.name}.so"


# The levels of the x86-64 psABI (https://gitlab.com/x86-psABIs/x86-64-ABI); `abm` is LZCNT in Linux's names.
_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))
_VNNI = _V4 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
_AMX = _BF16 | {"amx_tile", "amx_bf16"}
_V4_VNNI = ("-march=x86-64-v4", "-mavx512vnni")
_V4_BF16 = (*_V4_VNNI, "-mavx512bf16")
_NEON = frozenset(("asimd", "asimdrdm", "atomics", "crc32"))
VARIANTS = (  # the best first, for each machine
    KernelVariant(
        *("amx", "x86_64", _AMX, (*_V4_BF16, "-mamx-tile", "-mamx-bf16")),
        zig_cpu="x86_64_v4+avx512vnni+avx512bf16+amx_tile+amx_bf16",
    ),
    KernelVariant("avx512_bf16", "x86_64", _BF16, _V4_BF16, "x86_64_v4+avx512vnni+avx512bf16"),
    KernelVariant("avx512_vnni", "x86_64", _VNNI, _V4_VNNI, "x86_64_v4+avx512vnni"),
    KernelVariant("avx512", "x86_64", _V4, ("-march=x86-64-v4",), "x86_64_v4"),
    KernelVariant("avx2", "x86_64", _V3, ("-march=x86-64-v3",), "x86_64_v3"),
    KernelVariant("neon", "aarch64", _NEON, ("-march=armv8.2-a",), "generic+v8_2a"),
)


def runnable() -> tuple[KernelVariant, ...]:
    """Returns the variants that this CPU can run, the best first."""
    machine, flags = platform.machine(), _cpu_flags()
    return tuple(variant for variant in VARIANTS if variant.machine == machine and variant.flags <= flags)


def multiplies_other_bf16() -> bool:
    """Returns whether this CPU has Arm's instructions for products of bf16, which no variant uses."""
    return platform.machine() == "aarch64" and "bf16" in _cpu_flags()


def _cpu_flags() -> frozenset[str]:
    """Returns the names of the instruction sets that Linux lists for this CPU; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    listed = (line.partition(":") for line in lines)
    return next(
        (frozenset(names.split()) for key, _, names in listed if key.strip() in ("flags", "Features")), frozenset()
    )
