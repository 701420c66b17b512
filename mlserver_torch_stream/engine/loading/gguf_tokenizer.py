"""Loads the tokenizer of a GGUF file, including the keys that transformers' reader does not know."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf import read_gguf_metadata
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from mlserver_torch_stream.errors import LoadFailed

_KEY = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type: tokens that are found whole in a text
_TEMPLATES = "tokenizer.chat_template."  # the keys of templates that have a name
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Values of tokenizer.ggml.pre, which says how text is split before merges: either as GPT-2 splits it, which is the
# default of transformers' reader, or in the same way after each digit was split off.
_AS_GPT2 = ("gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "phi-2", "gigachat", "a.x-4.0", "mellum")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
# With these values, a piece of text that is a token becomes that token, whatever the merges say, and a BOS is added
# unless the file says otherwise.
_WHOLE_PIECES = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken")
)
_OWN_SPACES = ("gemma", "gemma2", "gemma3", "phi3")  # architectures whose spaces transformers' reader handles


def load_gguf_tokenizer(gguf_file: Path) -> Any:
    """Loads the tokenizer. Raises LoadFailed if the file names an unknown pre-tokenizer.

    The special tokens are set from the file's ids, because transformers 5.17 uses ``<|im_start|>`` as SmolLM2's end of
    text.
    """
    metadata, _ = read_gguf_metadata(str(gguf_file), (f"{_KEY}tokens",))
    cut = _way_to_cut(metadata)
    with _folder_of(gguf_file) as folder:
        # The class of a family, such as Qwen's, would cut text in its own way when a conversion is loaded.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=gguf_file.name)
    if cut is not None:
        _restore_spelling(tokenizer, metadata)
    for role, key in _SPECIAL_TOKENS.items():
        if _KEY + key in metadata:
            setattr(tokenizer, role, tokenizer.convert_ids_to_tokens(int(metadata[_KEY + key])))
    tokenizer.update_post_processor()  # which has the ids of BOS and EOS
    named = {key.removeprefix(_TEMPLATES): text for key, text in metadata.items() if key.startswith(_TEMPLATES)}
    if named:
        usual = tokenizer.chat_template or named.get("tool_use")
        tokenizer.chat_template = named if usual is None else {"default": usual, **named}
    backend = tokenizer.backend_tokenizer
    if cut in _SINGLE_DIGITS:
        digits = pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if cut in _WHOLE_PIECES:
        backend.model.ignore_merges = True
        tokenizer.add_bos_token = bool(metadata.get(f"{_KEY}add_bos_token", True))
    if metadata.get(f"{_KEY}model") == "llama" and metadata.get("general.architecture") not in _OWN_SPACES:
        # As in llama.cpp, a space is added after each special token, too, such as the BOS that a chat template writes.
        adds = metadata.get(f"{_KEY}add_space_prefix") is not False
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if adds else "never", split=False)
        if not adds:
            backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _restore_spelling(tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    """Makes the special tokens of a byte-level vocabulary whole tokens also if they are not ASCII, as DeepSeek's.

    transformers writes such tokens as bytes, and then finds them in no text. It also adds tokens that the file does not
    have, for which the model has no weights.
    """
    tokens, kinds = metadata[f"{_KEY}tokens"], metadata.get(f"{_KEY}token_type") or ()
    spelling = bytes_to_unicode()
    alphabet = set(spelling.values())
    lost = [
        (number, token, kind)
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) and not alphabet.issuperset(token)
    ]
    if not lost and max(tokenizer.added_tokens_decoder, default=0) < len(tokens):
        return
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary, added = state["model"]["vocab"], state["added_tokens"]
    merged = {part for first, second in state["model"]["merges"] for part in (first, second, first + second)}
    added[:] = [token for token in added if token["id"] < len(tokens)]
    for number, token, kind in lost:
        written = "".join(spelling[byte] for byte in token.encode())
        if vocabulary.get(written) == number and written not in merged:
            vocabulary[token] = vocabulary.pop(written)
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            added.append({"id": number, "content": token, "special": kind == _CONTROL, **flags})
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))


@contextmanager
def _folder_of(gguf_file: Path) -> Iterator[str]:
    """Makes a folder with a link to the file alone, because transformers would read a tokenizer.json beside the file,
    which may be that of another model, instead of the file."""
    with tempfile.TemporaryDirectory(prefix="mlserver-torch-stream-") as folder:
        Path(folder, gguf_file.name).symlink_to(gguf_file.absolute())
        yield folder


def _way_to_cut(metadata: Mapping[str, Any]) -> str | None:
    """Returns the value of ``pre`` if the vocabulary is byte-level; None for other kinds, which do not split text."""
    if metadata.get(f"{_KEY}model") != "gpt2":
        return None
    cut = metadata.get(f"{_KEY}pre")
    if cut is None:
        raise LoadFailed(
            f"the key {_KEY}pre is missing, so text would be split into wrong tokens; convert the model to GGUF again"
        )
    if cut not in (*_AS_GPT2, *_SINGLE_DIGITS, *GGUF_PRE_TOKENIZER_SPLITS):
        raise LoadFailed(f"the key {_KEY}pre is {cut!r}, which is not supported here")
    return str(cut)
