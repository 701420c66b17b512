"""Runs llama.cpp's converter on folders of models, with the tiny tokenizer in place of theirs.

``python convert_hf.py CONVERTER FORMAT FOLDER FILE [FOLDER FILE]...``: ``CONVERTER`` is the folder of
``convert_hf_to_gguf.py``, whose own package gguf is used.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


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
