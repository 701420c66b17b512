"""Files written by llama.cpp's own converter give the tokens of the models from which they were made.

``make test-gguf`` downloads the converter and runs these tests; otherwise ``LLAMA_CPP`` names its folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from mlserver_torch_stream.engine.loading.gguf import load_gguf
from mlserver_torch_stream.engine.loading.gguf_packed import load_packed, write_packed
from tests.engine import convert_hf
from tests.engine.gguf_originals import BY_TRANSFORMERS, ORIGINALS, make_original, write_original
from tests.engine.test_gguf_originals import WITHOUT_KERNELS, check_same
from tests.engine.tiny_gguf import TOKENS

CONVERTER = Path(os.environ.get("LLAMA_CPP", "llama.cpp"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CONVERTER / "convert_hf_to_gguf.py").is_file(),
        reason="LLAMA_CPP names no folder with convert_hf_to_gguf.py; make test-gguf downloads one",
    ),
]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``NAME/f32.gguf`` and ``NAME/q8_0.gguf`` for each original model."""
    place = tmp_path_factory.mktemp("converted")
    for name in ORIGINALS | BY_TRANSFORMERS:
        make_original(name).save_pretrained(place / name)
        vocabulary = {"model": {"vocab": {token: number for number, token in enumerate(TOKENS)}}, "added_tokens": []}
        (place / name / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    for kind in ("f32", "q8_0"):
        paths = [str(place / name / last) for name in ORIGINALS | BY_TRANSFORMERS for last in ("", f"{kind}.gguf")]
        command = [sys.executable, convert_hf.__file__, str(CONVERTER), kind, *paths]
        run = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, run.stderr[-3000:]
    return place


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("name", ORIGINALS | BY_TRANSFORMERS)
def test_a_converted_file_gives_the_tokens_of_its_original(name: str, kind: str, converted: Path) -> None:
    check_same(load_gguf(converted / name / f"{kind}.gguf", "float32"), make_original(name))


@pytest.mark.parametrize("name", [name for name in ORIGINALS if name not in WITHOUT_KERNELS])
def test_a_converted_file_that_stays_packed_gives_them_too(name: str, converted: Path, tmp_path: Path) -> None:
    write_packed(converted / name / "q8_0.gguf", tmp_path)
    check_same(load_packed(tmp_path, converted / name / "q8_0.gguf").model, make_original(name))


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_files_of_the_fast_tests_are_those_of_the_converter(name: str, converted: Path, tmp_path: Path) -> None:
    ours, theirs = (
        gguf.GGUFReader(file)
        for file in (write_original(make_original(name), tmp_path / "m.gguf"), converted / name / "f32.gguf")
    )
    assert _keys(ours) == _keys(theirs)
    (mine, its) = ({tensor.name: tensor.data for tensor in reader.tensors} for reader in (ours, theirs))
    assert mine.keys() == its.keys()
    assert all(np.allclose(mine[name], its[name], atol=1e-6) for name in mine)


def _keys(reader: Any) -> dict[str, Any]:
    prefix = reader.fields["general.architecture"].contents()
    return {name: field.contents() for name, field in reader.fields.items() if name.startswith(f"{prefix}.")}
