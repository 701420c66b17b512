"""The inputs and outputs that a model of this runtime declares over V2.

Knows nothing of the model: the spelling is the same for all of them.
"""

from __future__ import annotations

from mlserver.types import MetadataTensor, Parameters

from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.parameter_table import PARAMETERS
from mlserver_torch_stream.protocol.seldon_chat import MESSAGE_TENSORS


def input_metadata() -> list[MetadataTensor]:
    """Every input tensor by its canonical name; ``aliases`` are its other names."""
    tensors = [
        _tensor(names.TEXT_INPUT, "BYTES", -1, names.TEXT_ALIASES),
        _tensor(names.INPUT_IDS, "INT64", -1),
        _tensor(names.MESSAGES, "BYTES", 1),
        *(_tensor(name, "BYTES", -1) for name in MESSAGE_TENSORS),
        _tensor(names.TOOLS, "BYTES", -1),
        _tensor(names.SAMPLING_PARAMETERS, "BYTES", 1),
    ]
    for parameter in PARAMETERS:
        if parameter.tensor is not None:
            size = -1 if parameter.several else 1
            tensors.append(_tensor(parameter.name, parameter.tensor, size, parameter.aliases))
    return tensors


def output_metadata() -> list[MetadataTensor]:
    """Every output tensor, also tensors that only some replies have."""
    outputs = {**names.OUTPUT_DATATYPES, **names.CHAT_OUTPUT_DATATYPES}
    return [_tensor(name, datatype, 1 if name == names.OUTPUT_ALL else -1) for name, datatype in outputs.items()]


def _tensor(name: str, datatype: str, size: int, aliases: tuple[str, ...] = ()) -> MetadataTensor:
    parameters = Parameters.model_validate({"aliases": ",".join(aliases)}) if aliases else None
    return MetadataTensor.model_validate(
        {"name": name, "datatype": datatype, "shape": [size], "parameters": parameters}
    )
