"""Loads malicious files, in a process with little memory. ``test_hostile_files`` runs it.

Each load must end within seconds, with an engine or with an error of this package; anything else fails the test.
"""

from __future__ import annotations

import json
import resource
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mlserver_torch_stream.engine.build import build_engine
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings

MEMORY = 6 * 2**30  # of addresses; torch alone has 4 GiB
SECONDS = 30  # for a load; SIGALRM ends the process

_NUMBERS = st.one_of(
    st.integers(0, 20), st.sampled_from([2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_KEYS = ["general.architecture", "general.alignment", "general.file_type", "llama.block_count", "llama.context_length",
         "llama.embedding_length", "llama.attention.head_count", "llama.attention.head_count_kv", "llama.vocab_size",
         "llama.feed_forward_length", "llama.rope.dimension_count", "llama.attention.layer_norm_rms_epsilon",
         "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.eos_token_id",
         "tokenizer.ggml.token_type", "tokenizer.chat_template"]  # fmt: skip
_DEPTHS = st.sampled_from([1, 2, 60, 200, 900, 960, 980, 1000, 5000])


def _text(data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(data) if length is None else length) + data


@st.composite
def _value(draw: Any, kind: int) -> bytes:
    """A value in a GGUF file's metadata."""
    if kind == _STRING:
        given = draw(st.sampled_from([b"llama", b"gpt2", b"qwen2", b"", b"\xff", b"x" * 300, b"{{" + b"(" * 3000]))
        return _text(given, draw(st.one_of(st.none(), _NUMBERS)) if draw(st.integers(0, 9)) == 0 else None)
    if kind == _ARRAY:
        depth = draw(_DEPTHS)
        inner = draw(st.sampled_from([*_SCALARS, _STRING, 13, 2**31]))
        count = draw(_NUMBERS)
        held = b"".join(draw(_value(inner)) for _ in range(min(count, 3)))
        return struct.pack("<IQ", _ARRAY, 1) * (depth - 1) + struct.pack("<IQ", inner, count) + held
    layout = _SCALARS.get(kind, "<I")
    size = struct.calcsize(layout)
    return draw(
        st.one_of(
            _NUMBERS.map(lambda number: struct.pack("<Q", number)[:size]), st.binary(min_size=size, max_size=size)
        )
    )


@st.composite
def gguf_headers(draw: Any) -> bytes:
    """The bytes of a GGUF file, generated field by field."""
    entries = draw(st.lists(st.sampled_from(_KEYS), max_size=6))
    body = b""
    for name in entries:
        kind = draw(st.sampled_from([*_SCALARS, _STRING, _ARRAY, _ARRAY, 77]))
        body += _text(name.encode()) + struct.pack("<I", kind) + draw(_value(kind))
    tensors = draw(st.lists(st.tuples(st.lists(_NUMBERS, max_size=5), st.integers(0, 40), _NUMBERS), max_size=3))
    for number, (shape, kind, offset) in enumerate(tensors):
        body += _text(f"blk.{number}.attn_q.weight".encode())
        body += struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", size) for size in shape)
        body += struct.pack("<IQ", kind, offset)
    counts = draw(st.one_of(st.just((len(tensors), len(entries))), st.tuples(_NUMBERS, _NUMBERS)))
    return b"GGUF" + struct.pack("<IQQ", draw(st.sampled_from([2, 3, 3, 3, 0, 2**31])), *counts) + body


@st.composite
def spoilt(draw: Any, whole: bytes, head: int) -> bytes:
    """A valid file with some of its first ``head`` bytes changed, sometimes also truncated."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, head - 9))
        new = draw(st.one_of(_NUMBERS.map(lambda number: struct.pack("<Q", number)), st.binary(min_size=1, max_size=4)))
        data[place : place + len(new)] = new
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 4)) == 0 else data)


_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, st.floats(), st.text(max_size=5), st.just(-1)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def safetensors_headers(draw: Any) -> bytes:
    """A safetensors file with a JSON header, of which one or more entries are wrong."""
    entry = st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.one_of(st.sampled_from(["F32", "BF16", "F8_E4M3", "BOOL", "F4", "X"]), _JSON),
            "shape": st.one_of(st.lists(_NUMBERS, max_size=4), _JSON),
            "data_offsets": st.one_of(st.lists(_NUMBERS, min_size=2, max_size=2), _JSON),
        },
    )
    names = st.sampled_from(["lm_head.weight", "model.norm.weight", "__metadata__", "model.embed_tokens.weight"])
    header = draw(st.one_of(st.dictionaries(names, st.one_of(entry, _JSON), max_size=4), _JSON))
    text = json.dumps(header).encode()
    if draw(st.integers(0, 9)) == 0:
        text = b'{"a":' * (depth := draw(_DEPTHS)) + b"1" + b"}" * depth
    length = draw(st.one_of(st.just(len(text)), st.just(len(text)), _NUMBERS))
    return struct.pack("<Q", length) + text + bytes(draw(st.integers(0, 64)))


@st.composite
def configs(draw: Any, whole: bytes) -> bytes:
    """A JSON object with some of its values replaced."""
    fields = json.loads(whole)
    for name in draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3)):
        fields[name] = draw(st.one_of(_NUMBERS, _JSON))
    text = json.dumps(fields)
    if draw(st.integers(0, 9)) == 0:
        depth = draw(_DEPTHS)
        text = text[:-1] + ', "nested": ' + "[" * depth + "]" * depth + "}"
    return text.encode()


def load(place: Path, cache: Path) -> None:
    """Loads a model. LoadFailed is an accepted outcome."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        extra = {"cache_dir": str(cache), "threads": 1, "engine": "serial"}  # which compiles nothing
        resolved = parse_settings(str(place), extra, environ={})
        build_engine(resolved, resources=ProcessResources()).shutdown()
    except LoadFailed as error:
        assert "\n" not in str(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def fuzz(strategy: st.SearchStrategy[bytes], examples: int, file: Path, place: Path, cache: Path) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def attack(content: bytes) -> None:
        file.write_bytes(content)
        load(place, cache)

    attack()


def main(folder: Path, gguf_file: Path, examples: int) -> None:
    """``folder`` and ``gguf_file`` contain valid models."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    whole, scratch = gguf_file.read_bytes(), Path(tempfile.mkdtemp(dir=folder.parent))
    file, cache = scratch / "hostile.gguf", scratch / "cache"
    run: Callable[..., None] = partial(fuzz, cache=cache, examples=examples)
    run(gguf_headers(), file=file, place=file)
    run(spoilt(whole, 8000), file=file, place=file)
    for name, strategy in {
        "model.safetensors": st.one_of(
            safetensors_headers(), spoilt((folder / "model.safetensors").read_bytes(), 3000)
        ),
        "config.json": configs((folder / "config.json").read_bytes()),
        "generation_config.json": configs((folder / "generation_config.json").read_bytes()),
        "tokenizer.json": spoilt((folder / "tokenizer.json").read_bytes(), 5000),
        "tokenizer_config.json": configs((folder / "tokenizer_config.json").read_bytes()),
    }.items():
        spoilt_folder = Path(shutil.copytree(folder, scratch / "model", dirs_exist_ok=True))
        run(strategy, file=spoilt_folder / name, place=spoilt_folder)
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
