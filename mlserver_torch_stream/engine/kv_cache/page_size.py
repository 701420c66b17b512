"""Chooses how many tokens a page holds.

Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

CPU_PAGE_SIZE = 16
CUDA_PAGE_SIZE = 256  # torch's varlen kernels read block tables of pages that are multiples of it


def page_size_of(kinds: Iterable[str]) -> int:
    """Returns the tokens of a page of a cache on devices of these types, as ``torch.device.type`` names them."""
    return CUDA_PAGE_SIZE if "cuda" in kinds else CPU_PAGE_SIZE
