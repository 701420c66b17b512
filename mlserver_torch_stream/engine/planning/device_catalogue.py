"""Lists devices by name, with the memory, bandwidth and speed that their vendors state.

Knows nothing of models. Speeds are without sparsity. A data sheet's GB count as 10^9 bytes; drivers report up to 7 %
more (85.5 for the 80 of an H100, 24.15 for the 24 of L4 and A10).

Checked on 2026-11-22. Not all of the vendor's documents could be read themselves:

- A10: 125 TFLOP/s in bf16 and 600 GB/s, in NVIDIA's a10-datasheet.pdf. The A10G of a cloud is another chip.
- H100 PCIe: 1,513 with sparsity, half of it without, 80 GB, "greater than 2,000 GB/s", in the H100 data sheet as
  hpctech.co.jp has it and in the product brief PB-11133.
- RTX 4090: 165.2 with sums in float32 and 1,008 GB/s, in nvidia-ada-gpu-architecture.pdf.
- B200: 2,250 at 1,000 W in table 3 of the Blackwell architecture's technical brief, which says 8 TB/s. Boards have
  180 GB; their driver reports 7,680 bits at 3,996 MHz (pytorch/ao, pull request 4002): 7.67 TB/s.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlserver_torch_stream.did_you_mean import did_you_mean_or_known
from mlserver_torch_stream.errors import SettingsError


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """``source`` is the vendor's document with these numbers."""

    name: str
    memory: int  # bytes
    bandwidth: float  # bytes a second
    flops: float | None  # of dense bf16 products, per second
    source: str


def _nvidia(name: str, memory_gb: float, bandwidth_gb: float, tflops: float, sheet: str) -> DeviceSpec:
    return DeviceSpec(f"NVIDIA {name}", int(memory_gb * 1e9), bandwidth_gb * 1e9, tflops * 1e12, f"NVIDIA {sheet}")


KNOWN = {
    "l4": _nvidia("L4", 24, 300, 121, "L4 data sheet"),
    "a10": _nvidia("A10", 24, 600, 125, "A10 data sheet"),
    "l40s": _nvidia("L40S", 48, 864, 362, "L40S data sheet"),
    "rtx-4090": _nvidia("GeForce RTX 4090", 24, 1008, 165.2, "Ada GPU architecture white paper"),
    "a100-40gb": _nvidia("A100 40GB SXM", 40, 1555, 312, "A100 data sheet"),
    "a100-80gb": _nvidia("A100 80GB SXM", 80, 2039, 312, "A100 80GB data sheet"),
    "h100-pcie": _nvidia("H100 PCIe", 80, 2000, 756, "H100 data sheet"),
    "h100": _nvidia("H100 SXM", 80, 3350, 989, "H100 data sheet"),
    "h200": _nvidia("H200 SXM", 141, 4800, 989, "H200 data sheet"),
    "b200": _nvidia("HGX B200", 180, 7672, 2250, "Blackwell architecture brief; memory as the driver reports it"),
}


def find_device(name: str) -> DeviceSpec:
    """Raises SettingsError, which names the known devices."""
    device = KNOWN.get(name.lower().replace("_", "-"))
    if device is None:
        hint = did_you_mean_or_known(name.lower(), KNOWN, str)
        raise SettingsError(f"--device: {name!r} is not known{hint}; for another give --memory and --bandwidth")
    return device
