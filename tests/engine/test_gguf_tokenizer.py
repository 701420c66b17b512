"""The tokenizer of a GGUF file splits and joins text as the file says, or the load fails and names the key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mlserver_torch_stream.engine.config_fields import plain_config
from mlserver_torch_stream.engine.loading.gguf_tokenizer import load_gguf_tokenizer
from mlserver_torch_stream.engine.loading.tokenizer_files import loader_of
from mlserver_torch_stream.errors import LoadFailed

BYTE_LEVEL = ["<s>", "</s>", *bytes_to_unicode().values(), "12", "Ġ1", "abc"]
NOT_ASCII = ["<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cUser\uff5c>"]  # special tokens of DeepSeek
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁a", "▁ab"]


def write(path: Path, model: str, tokens: Sequence[str], architecture: str = "llama", **keys: Any) -> Path:
    """Writes a file that has only a tokenizer. ``keys`` are those under ``tokenizer.ggml``."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    writer.add_token_types([kinds[token in ("<unk>", "<s>", "</s>", *NOT_ASCII)] for token in tokens])
    for key, value in keys.items():
        writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(path: Path, **keys: Any) -> Path:
    return write(path, "gpt2", BYTE_LEVEL, merges=["1 2", "Ġ 1"], bos_token_id=0, eos_token_id=1, **keys)


def sentencepiece(path: Path, **keys: Any) -> Path:
    scores = [-float(index) for index in range(len(PIECES))]
    return write(path, "llama", PIECES, scores=scores, bos_token_id=1, eos_token_id=2, unknown_token_id=0, **keys)


def reloaded(tokenizer: Any, folder: Path) -> Any:
    """Returns the tokenizer as a later start loads it from the conversion."""
    tokenizer.save_pretrained(folder)
    return loader_of(folder).from_pretrained(folder)


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["a", "b", "c", "Ġ", "12"]),
        ("smollm", ["a", "b", "c", "Ġ", "1", "2"]),  # each digit alone
        ("qwen2", ["a", "b", "c", "Ġ", "1", "2"]),
        ("dbrx", ["a", "b", "c", "Ġ", "12"]),
        ("llama-bpe", ["abc", "Ġ", "12"]),  # a whole piece that is a token, without a merge for it
        ("tekken", ["abc", "Ġ", "1", "2"]),
    ],
)
def test_text_is_cut_as_the_file_says(pre: str, tokens: list[str], tmp_path: Path) -> None:
    tokenizer = load_gguf_tokenizer(byte_level(tmp_path / "m.gguf", pre=pre))
    assert tokenizer.tokenize("abc 12") == tokens
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).tokenize("abc 12") == tokens


def test_special_tokens_that_are_not_ascii_are_found_in_text(tmp_path: Path) -> None:
    """As those of the models that DeepSeek has distilled into Qwen and Llama."""
    begin, user = (len(BYTE_LEVEL) + number for number in range(2))
    keys: dict[str, Any] = {"merges": ["1 2", "Ġ 1"], "bos_token_id": begin, "eos_token_id": 1, "add_bos_token": True}
    file = write(tmp_path / "m.gguf", "gpt2", [*BYTE_LEVEL, *NOT_ASCII], pre="deepseek-r1-qwen", **keys)
    tokenizer = load_gguf_tokenizer(file)
    letter = tokenizer.convert_tokens_to_ids("a")
    for each in (tokenizer, reloaded(tokenizer, tmp_path)):
        assert each.bos_token == NOT_ASCII[0]
        assert each(f"{NOT_ASCII[1]}a")["input_ids"] == [begin, user, letter]
        assert each.decode([begin, user, letter]) == "".join([*NOT_ASCII, "a"])
        assert each.decode([begin, user, letter], skip_special_tokens=True) == "a"


def test_no_token_is_added_for_which_the_model_has_no_weights(tmp_path: Path) -> None:
    """For example ``<|endoftext|>``, which is plain text for most models."""
    tokenizer = load_gguf_tokenizer(byte_level(tmp_path / "m.gguf", pre="qwen2"))
    assert max(tokenizer.get_vocab().values()) == len(BYTE_LEVEL) - 1
    assert max(tokenizer("<|endoftext|>")["input_ids"]) < len(BYTE_LEVEL)


def test_tokenizer_files_beside_the_file_are_not_read(tmp_path: Path) -> None:
    """The converter writes a file into the model's folder; another model's file may be there, too."""
    file = byte_level(tmp_path / "m.gguf", pre="smollm")
    load_gguf_tokenizer(sentencepiece(tmp_path / "other.gguf")).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    assert load_gguf_tokenizer(file).tokenize("abc 12") == ["a", "b", "c", "Ġ", "1", "2"]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_a_conversion_cuts_text_as_the_file_says_and_not_as_its_family(architecture: str, tmp_path: Path) -> None:
    """Models of one architecture can have the vocabulary of another family."""
    file = byte_level(tmp_path / "m.gguf", architecture=architecture, pre="dbrx")
    assert load_gguf_tokenizer(file).tokenize("abc 12") == ["a", "b", "c", "Ġ", "12"]
    load_gguf_tokenizer(file).save_pretrained(tmp_path)
    again = loader_of(tmp_path).from_pretrained(tmp_path, config=plain_config({"model_type": architecture}))
    assert again.tokenize("abc 12") == ["a", "b", "c", "Ġ", "12"]


@pytest.mark.parametrize(("keys", "said"), [({"pre": "grok-2"}, "is 'grok-2', which is not"), ({}, "pre is missing")])
def test_a_way_to_cut_that_is_not_known_is_refused(keys: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=said):
        load_gguf_tokenizer(byte_level(tmp_path / "m.gguf", **keys))


@pytest.mark.parametrize(
    ("keys", "begins"),
    [
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "gpt-2"}, False),
        ({"pre": "gpt-2", "add_bos_token": True}, True),
    ],
)
def test_a_text_begins_with_the_token_that_the_file_asks_for(
    keys: dict[str, Any], begins: bool, tmp_path: Path
) -> None:
    """Llama 3's files of 2024 lack the key, but need the token."""
    ids = load_gguf_tokenizer(byte_level(tmp_path / "m.gguf", **keys))("a")["input_ids"]
    assert (ids[0] == 0) == begins


@pytest.mark.parametrize(("space", "tokens"), [(True, ["▁ab", "▁a"]), (False, ["ab", "▁a"])])
def test_a_space_before_the_text_is_added_if_the_file_says_so(space: bool, tokens: list[str], tmp_path: Path) -> None:
    tokenizer = load_gguf_tokenizer(sentencepiece(tmp_path / "m.gguf", add_space_prefix=space))
    for each in (tokenizer, reloaded(tokenizer, tmp_path)):
        assert each.tokenize("ab a") == tokens
        assert each.tokenize("<s>ab a</s>ab a") == ["<s>", *tokens, "</s>", *tokens], "after a special token, too"
        assert each.decode(each("ab a")["input_ids"], skip_special_tokens=True) == "ab a"
