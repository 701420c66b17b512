"""Pickles a decoder without the weights that a file holds, so that another process reads these from the file."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlserver_torch_stream.engine.native.rotary import angles_of
from mlserver_torch_stream.engine.native.structure import Decoder


def pickle_decoder(decoder: Decoder, tensors: Mapping[str, Tensor]) -> bytes:
    """Names the rows of ``tensors`` that the decoder holds; its other tensors, such as factors of norms, are copied.

    Raises UnsupportedLayout if its rotary module does more than ``RotaryAngles``.
    """
    pickled = io.BytesIO()
    _Pickler(pickled, tensors).dump(replace(decoder, rotary=angles_of(decoder.rotary)))
    return pickled.getvalue()


def unpickle_decoder(pickled: bytes, tensor: Callable[[str], Tensor]) -> Decoder:
    """``tensor`` returns a tensor of the file by its name."""
    decoder: Decoder = _Unpickler(pickled, tensor).load()
    return decoder


class _Pickler(pickle.Pickler):
    def __init__(self, to: io.BytesIO, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(to)
        self._tensors = tensors

    def persistent_id(self, thing: Any) -> Any:
        """Returns the tensor's name, first row and number of rows, or its values as a numpy array; None: no tensor."""
        if not isinstance(thing, Tensor):
            return None
        for name, whole in self._tensors.items():
            first, rest = divmod(thing.data_ptr() - whole.data_ptr(), whole[0].nbytes)
            alike = thing.dtype == whole.dtype and thing.shape[1:] == whole.shape[1:] and thing.is_contiguous()
            if alike and rest == 0 and 0 <= first < len(whole):
                return name, first, len(thing)
        return thing.numpy()


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensor: Callable[[str], Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))

        def rows(name: str, first: int, count: int) -> Tensor:
            return tensor(name)[first : first + count]

        self._rows = cache(rows)  # weights that are tied stay one object

    def persistent_load(self, given: Any) -> Tensor:
        return torch.from_numpy(given) if isinstance(given, np.ndarray) else self._rows(*given)
