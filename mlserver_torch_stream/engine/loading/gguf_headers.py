"""Lets transformers parse the header of a GGUF file once, instead of anew for tokenizer, config and weights.

Knows nothing of the use of a header. Measured on 2026-11-22 with the embedded model, whose header lists 49,000
tokens: each of five parses took 3.3 s of Python, and 397 equal tables of tensor names, one for each module, took 3 s;
a conversion took 26 s of CPU time and takes 7.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import gguf

_ONE = threading.Lock()  # the patched names in ``gguf`` are those of the whole process


@contextmanager
def headers_parsed_once() -> Iterator[None]:
    """Inside it, gguf makes its readers and name tables once per file and architecture."""
    with _ONE:
        reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader = functools.cache(reader)
        gguf.get_tensor_name_map = functools.cache(names)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = reader, names
