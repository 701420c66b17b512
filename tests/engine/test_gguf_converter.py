"""Files written by llama.cpp's own converter give the tokens of the models from which they were made.

``make test-gguf`` downloads llama.cpp and runs these tests; otherwise ``LLAMA_CPP`` names its folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from mlserver_torch_stream.engine.loading.gguf import load_gguf
from mlserver_torch_stream.engine.loading.gguf_packed import load_packed, write_packed
from tests.engine.convert_hf import IS_THERE, convert
from tests.engine.gguf_originals import BY_TRANSFORMERS, ORIGINALS, make_original, write_original
from tests.engine.test_gguf_originals import WITHOUT_KERNELS, check_same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not IS_THERE,
        reason="LLAMA_CPP names no folder with convert_hf_to_gguf.py; make test-gguf downloads one",
    ),
]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``NAME/f32.gguf`` and ``NAME/q8_0.gguf`` for each original model."""
    models = {name: make_original(name) for name in ORIGINALS | BY_TRANSFORMERS}
    return convert(models, tmp_path_factory.mktemp("converted"), ("f32", "q8_0"))


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
