"""Makes torchvision importable beside a torch without CUDA, in workers of handlers.

The torchvision of PyPI is made for GPUs: beside a torch without them its own operators, of which the handlers use none,
cannot be loaded, and nothing of it can be imported unless somebody says what two of them look like.
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
    """A folder for PYTHONPATH, which does so at the start of each Python."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_OPERATORS)
    return str(folder)
