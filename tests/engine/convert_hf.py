"""Runs llama.cpp's converter on folders of models, with the tiny tokenizer in place of theirs.

``python convert_hf.py CONVERTER FORMAT FOLDER FILE [FOLDER FILE]...``: ``CONVERTER`` is the folder of
``convert_hf_to_gguf.py``, whose own package gguf is used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONVERTER = Path(os.environ.get("LLAMA_CPP", "llama.cpp"))
IS_THERE = (CONVERTER / "convert_hf_to_gguf.py").is_file()


def convert(models: Mapping[str, Any], place: Path, kinds: Sequence[str]) -> Path:
    """Makes ``NAME/KIND.gguf`` in ``place`` for each model."""
    from tests.engine.tiny_gguf import TOKENS

    vocabulary = {"model": {"vocab": {token: number for number, token in enumerate(TOKENS)}}, "added_tokens": []}
    for name, model in models.items():
        model.save_pretrained(place / name)
        (place / name / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    for kind in kinds:
        paths = [str(place / name / last) for name in models for last in ("", f"{kind}.gguf")]
        command = [sys.executable, __file__, str(CONVERTER), kind, *paths]
        run = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, run.stderr[-3000:]
    return place


def main(converter: Path, outtype: str, *paths: str) -> None:
    sys.path[:0] = [str(Path(__file__).parents[2]), str(converter), str(converter / "gguf-py")]
    import convert_hf_to_gguf

    from tests.engine.tiny_gguf import add_tiny_tokenizer

    class_of = convert_hf_to_gguf.get_model_class

    def with_tiny_tokenizer(*args: Any, **options: Any) -> type:
        found = class_of(*args, **options)
        found.set_vocab = lambda self: add_tiny_tokenizer(self.gguf_writer)
        found.no_mtp = True  # the originals have no layer for the prediction of several tokens
        return found

    convert_hf_to_gguf.get_model_class = with_tiny_tokenizer
    for folder, file in zip(paths[::2], paths[1::2], strict=True):
        sys.argv = [str(converter), folder, "--outfile", file, "--outtype", outtype]
        convert_hf_to_gguf.main()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
