"""Makes torchvision importable beside a torch without CUDA, in workers of handlers.

The torchvision of PyPI is built for GPUs. With a torch without them, its own operators cannot be loaded, and nothing of
it can be imported unless the signatures of two of them are declared. The handlers use none of these operators.
"""

from __future__ import annotations

from pathlib import Path

_OPERATORS = """
import importlib.util, pathlib, torch
try:
    torch.ops.load_library(str(pathlib.Path(importlib.util.find_spec("torchvision").origin).parent / "_C.so"))
except OSError:
    for name in ("nms", "qnms"):
        spelled = f"torchvision::{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(spelled.partition("(")[0], spelled[spelled.index("("):])
"""


def write_site(folder: Path) -> str:
    """Returns a folder for PYTHONPATH, which declares them whenever a Python starts."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_OPERATORS)
    return str(folder)
