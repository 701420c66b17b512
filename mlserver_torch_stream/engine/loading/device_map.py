"""Refuses a device map that names modules which a model does not have, before any weight is read.

transformers accepts such a map with a warning, and places the modules elsewhere. Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mlserver_torch_stream.did_you_mean import did_you_mean
from mlserver_torch_stream.engine.loading.config_fields import read_config
from mlserver_torch_stream.errors import LoadFailed


def check_device_map(device_map: Any, place: str, gguf_file: Path | None, **options: Any) -> None:
    """Checks that each key of a device map names a module of the model. Raises LoadFailed for the first that does not.

    ``place``: the folder or hub id of the model. ``options``: arguments of ``AutoConfig.from_pretrained``.
    """
    if not isinstance(device_map, Mapping) or set(device_map) == {""}:
        return
    config = read_config(place, place, gguf_file, **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=options.get("trust_remote_code", False))
    known = [name for name, _ in model.named_modules()]
    known += [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    for name in device_map:
        if name not in known:
            tops = [each for each in known if each and "." not in each]
            hint = did_you_mean(str(name), known) or f"; it begins with {', '.join(tops)}"
            raise LoadFailed(f"parameters.extra.device_map: the model has no module {name!r}{hint}")
