"""GGUF files are converted once and never seen half-written; if the cache cannot be written, the model is the same."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from mlserver_torch_stream.engine.failures import NotPacked
from mlserver_torch_stream.engine.fingerprint import checksum
from mlserver_torch_stream.engine.loading import gguf as gguf_module
from mlserver_torch_stream.engine.loading import gguf_tokenizer
from mlserver_torch_stream.engine.loading.gguf import converted_folder, hold_folder
from mlserver_torch_stream.engine.loading.gguf_tokenizer import load_gguf_tokenizer
from mlserver_torch_stream.engine.loading.loader import LoadedModel
from mlserver_torch_stream.engine.loading.locate import locate
from mlserver_torch_stream.engine.model import ModelLoad, prepare
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
from tests.engine.full_disk import max_file_bytes
from tests.engine.test_native_compile import bound, needs_permissions
from tests.engine.test_record import loaded
from tests.engine.tiny import load_model
from tests.engine.tiny_gguf import CONTEXT, write_tiny_gguf


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def load(gguf_file: Path, cache: Path, **extra: object) -> LoadedModel:
    return load_model(parse_settings(str(gguf_file), {"cache_dir": str(cache), **extra}, environ={}))


def conversions(caplog: pytest.LogCaptureFixture) -> int:
    return sum("Converting" in record.message for record in caplog.records)


def test_a_file_is_converted_once(gguf_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = load(gguf_file, tmp_path / "cache")
    second = load(gguf_file, tmp_path / "cache")
    assert conversions(caplog) == 1
    assert first.model.dtype == torch.bfloat16
    assert first.max_model_len == CONTEXT
    assert first.eos_token_ids == (1,)
    assert all(
        torch.equal(one, two) for one, two in zip(first.model.parameters(), second.model.parameters(), strict=True)
    )
    assert "tiny (llama" in first.description


def test_the_cache_goes_by_content_and_not_by_path(gguf_file: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(gguf_file, tmp_path / "tiny.gguf"))
    (tmp_path / "other").mkdir()
    other = write_tiny_gguf(tmp_path / "other" / "tiny.gguf", seed=1)
    folder = converted_folder(gguf_file, tmp_path / "cache")
    assert converted_folder(copy, tmp_path / "cache") == folder
    assert other.stat().st_size == gguf_file.stat().st_size
    assert converted_folder(other, tmp_path / "cache") != folder


def test_a_key_that_is_changed_in_place_is_read_again(tmp_path: Path) -> None:
    """As gguf-set-metadata does it; a checksum of samples of the file can miss the few bytes of a key."""
    file = write_tiny_gguf(tmp_path / "tiny.gguf", hidden=512)
    assert load(file, tmp_path / "cache").eos_token_ids == (1,)
    before = checksum(file)
    gguf.GGUFReader(file, "r+").fields["tokenizer.ggml.eos_token_id"].parts[-1][0] = 7
    assert checksum(file) == before
    assert load(file, tmp_path / "cache").eos_token_ids == (7, 1)


def test_other_users_can_read_a_conversion(gguf_file: Path, tmp_path: Path) -> None:
    """Root may fill the cache of an image that another user runs."""
    folder = converted_folder(gguf_file, tmp_path)
    assert folder is not None and (folder / "model.safetensors").is_file()
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}


def test_two_that_convert_the_same_file_do_it_once(
    gguf_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: converted_folder(gguf_file, tmp_path), range(2)))
    assert folders[0] == folders[1]
    assert conversions(caplog) == 1


def test_what_a_killed_process_left_is_neither_used_nor_kept(gguf_file: Path, tmp_path: Path) -> None:
    target = converted_folder(gguf_file, tmp_path)
    assert target is not None
    orphan = target.with_name(f"{target.name}.partial-dead")
    target.rename(orphan)
    assert converted_folder(gguf_file, tmp_path) == target
    AutoModelForCausalLM.from_pretrained(target)
    assert not orphan.exists()


def test_a_file_that_is_replaced_while_it_is_converted_is_not_kept_as_the_former_one(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a conversion is made from the content before; with the former file, a later load would find it."""
    file = Path(shutil.copy(gguf_file, tmp_path / "tiny.gguf"))

    def replaced_before(path: Path) -> Any:
        write_tiny_gguf(tmp_path / "other.gguf", seed=1).replace(path)
        return load_gguf_tokenizer(path)

    monkeypatch.setattr(gguf_tokenizer, "load_gguf_tokenizer", replaced_before)
    with pytest.raises(LoadFailed, match=r"cannot load .*tiny.gguf: it has changed while it was converted"):
        load(file, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_conversions_that_nobody_uses_do_not_stay_for_ever(gguf_file: Path, tmp_path: Path) -> None:
    """Each version of transformers and each dtype has its own conversion. Other folders of the user are not removed."""
    old, used = (converted_folder(gguf_file, tmp_path, dtype) for dtype in ("float32", "float16"))
    assert old is not None and used is not None
    foreign = tmp_path / "foreign-0123456789abcdef"
    foreign.mkdir()
    for folder in (old, used, foreign):
        os.utime(folder, (0, 0))
    assert converted_folder(gguf_file, tmp_path, "float16") == used
    new = converted_folder(gguf_file, tmp_path, "bfloat16")
    assert new is not None and new.is_dir()
    assert used.is_dir() and foreign.is_dir() and not old.exists()


def test_a_conversion_that_a_server_holds_stays_until_the_server_has_unloaded_the_model(
    gguf_file: Path, tmp_path: Path, folder: Path
) -> None:
    """A later start in another process of another user may find it old: only its owner can set its time."""
    (tmp_path / "kernels").symlink_to(folder / "kernels")
    prepared, _ = loaded(gguf_file, tmp_path, fast_path="off")
    (kept,) = (path for path in tmp_path.iterdir() if path.name.startswith("tiny-") and path.is_dir())
    for dtype in ("float32", "float16"):
        os.utime(kept, (0, 0))
        converted_folder(gguf_file, tmp_path, dtype)
        assert kept.is_dir() == (dtype == "float32")
        prepared = None  # type: ignore[assignment]
    assert prepared is None and not list(tmp_path.glob("*.partial-*"))


@pytest.mark.parametrize("full", ["model.safetensors", "tokenizer.json"])
def test_a_full_disk_costs_only_the_converted_folder(
    full: str, gguf_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = load(gguf_file, tmp_path)
    kept = converted_folder(gguf_file, tmp_path)
    assert kept is not None
    limit = (kept / full).stat().st_size - 1
    with max_file_bytes(limit):
        in_memory = load(gguf_file, tmp_path / "full")
    assert "converting in memory" in caplog.text
    assert not [path for path in (tmp_path / "full").iterdir() if path.is_dir()]
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(in_memory.model(ids).logits, expected.model(ids).logits)


def test_a_broken_file_fails_in_one_line_and_leaves_nothing(gguf_file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(gguf_file.read_bytes()[:4000])
    with pytest.raises(LoadFailed, match=r"cannot load .*broken\.gguf: ") as error:
        load(broken, tmp_path / "cache")
    assert "\n" not in str(error.value)
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]


@pytest.mark.parametrize("damage", ["cut", "zeros at the end", "no tokenizer", "no seal", "another seal"])
def test_a_damaged_conversion_is_made_anew(
    gguf_file: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = converted_folder(gguf_file, tmp_path)
    assert folder is not None
    weights = folder / "model.safetensors"
    before, size = load(gguf_file, tmp_path / "other"), weights.stat().st_size
    if damage == "cut":
        os.truncate(weights, size // 2)
    elif damage == "zeros at the end":  # what a power cut leaves of a file whose size was written first
        os.truncate(weights, size // 2)
        os.truncate(weights, size)
    elif damage == "another seal":
        (folder / "checksums.json").write_text("[1]")
    else:
        (folder / {"no tokenizer": "tokenizer.json", "no seal": "checksums.json"}[damage]).unlink()
    after = load(gguf_file, tmp_path)
    assert "damaged" in caplog.text
    assert all(
        torch.equal(one, two) for one, two in zip(before.model.parameters(), after.model.parameters(), strict=True)
    )
    caplog.clear()
    assert converted_folder(gguf_file, tmp_path) == folder and not caplog.records


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "model.safetensors").chmod(0o664),
        lambda folder: (folder / "checksums.json").chmod(0o646),
        lambda folder: folder.chmod(0o777),
        pytest.param(lambda folder: os.chown(folder / "tokenizer.json", 12345, 12345), marks=only_root),
    ],
)
def test_a_conversion_that_other_users_may_have_written_is_made_anew(
    harm: Callable[[Path], None], gguf_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = converted_folder(gguf_file, tmp_path)
    assert folder is not None
    harm(folder)
    held = hold_folder(folder)
    assert converted_folder(gguf_file, tmp_path) is None and folder.is_dir(), "a server uses it"
    del held
    assert converted_folder(gguf_file, tmp_path) == folder
    assert conversions(caplog) == 2 and f"{folder} is not used: " in caplog.text
    caplog.clear()
    assert converted_folder(gguf_file, tmp_path) == folder and not caplog.records


@only_root
def test_a_conversion_of_another_user_without_its_checksums_is_made_anew(gguf_file: Path, tmp_path: Path) -> None:
    folder = converted_folder(gguf_file, tmp_path)
    assert folder is not None
    (folder / "checksums.json").unlink()
    os.chown(folder / "tokenizer.json", 12345, 12345)
    assert converted_folder(gguf_file, tmp_path) == folder and (folder / "checksums.json").is_file()


_CONVERT_PACKED = """
import sys
from pathlib import Path
from mlserver_torch_stream.engine.failures import NotPacked
from mlserver_torch_stream.engine.loading.gguf import converted_folder
try:
    converted_folder(Path(sys.argv[1]), Path(sys.argv[2]), packed=True)
except NotPacked as error:
    print(error)
"""


@only_root
@needs_permissions
@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("{}/config.json", "{} is not used, because the user 12345 owns it, and cannot be removed: Permission denied"),
        ("{}.lock", "{}.lock: Permission denied"),
    ],
)
def test_a_conversion_of_another_user_that_cannot_be_removed_is_named(
    file: str, problem: str, gguf_file: Path, tmp_path: Path
) -> None:
    target = gguf_module._target(gguf_file, tmp_path, "auto", True)
    others = Path(file.format(target))
    others.parent.mkdir(exist_ok=True)
    others.touch()
    os.chown(others, 12345, 12345)
    if others.parent == target:
        os.chown(target, 12345, 12345)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [*bound, sys.executable, "-c", _CONVERT_PACKED, str(gguf_file), str(tmp_path)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=240, check=True).stdout
    assert f"in {tmp_path}: {problem.format(target)}; set cache_dir to a folder that only this user can write" in said


def test_a_conversion_that_other_users_could_replace_is_not_kept(
    gguf_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cache := tmp_path / "cache").mkdir()
    cache.chmod(0o777)
    assert converted_folder(gguf_file, cache) is None
    assert f"Cannot keep the converted tiny.gguf in {cache} (every user can replace it; set cache_dir" in caplog.text
    with pytest.raises(NotPacked, match=r"cannot be kept in .*cache: every user can replace it"):
        converted_folder(gguf_file, cache, packed=True)
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_conversion_tells_what_it_does(gguf_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    converted_folder(gguf_file, tmp_path)
    for what in ("Reading the tokenizer of", "Reading the weights of", "Writing the converted"):
        assert f"{what} tiny.gguf" in caplog.messages
        assert any(line.startswith(f"{what} tiny.gguf took") for line in caplog.messages)


def test_a_conversion_parses_the_header_once(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing takes seconds each time, as the tokens of a real vocabulary are parsed one by one."""
    parsed = []
    parse = gguf.GGUFReader._build_fields
    monkeypatch.setattr(gguf.GGUFReader, "_build_fields", lambda *of: parsed.append(of) or parse(*of))
    reader = gguf.GGUFReader
    converted_folder(gguf_file, tmp_path)
    assert len(parsed) == 1
    assert gguf.GGUFReader is reader, "gguf is as it was"


def test_without_a_writable_cache_the_model_is_the_same_and_one_warning_says_so(
    gguf_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    in_memory = load(gguf_file, tmp_path / "file" / "cache")
    warnings = [record for record in caplog.records if record.name.startswith("mlserver_torch_stream")]
    assert [record.levelname for record in warnings] == ["WARNING"]
    assert "converting in memory" in warnings[0].message

    cached = load(gguf_file, tmp_path / "cache")
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(in_memory.model(ids).logits, cached.model(ids).logits)
    assert in_memory.eos_token_ids == cached.eos_token_ids
    assert in_memory.tokenizer.encode("the end") == cached.tokenizer.encode("the end")


def test_a_file_without_a_conversion_that_is_replaced_fails_the_load(gguf_file: Path, tmp_path: Path) -> None:
    """The tokenizer and the weights would be those of two files."""
    file = Path(shutil.copy(gguf_file, tmp_path / "own.gguf"))
    resolved = parse_settings(str(file), {"cache_dir": str(file / "cache")}, environ={})
    files = locate(resolved)
    os.utime(file, (1, 1))
    with pytest.raises(LoadFailed, match=r"own\.gguf: it has changed while it was loaded"):
        prepare(files, ModelLoad(resolved, 1, ProcessResources()))


def test_the_weights_keep_the_type_that_is_asked_for(gguf_file: Path, tmp_path: Path) -> None:
    assert load(gguf_file, tmp_path, dtype="float32").model.dtype == torch.float32
    floats = write_tiny_gguf(tmp_path / "floats.gguf", quantized=False)
    assert load(floats, tmp_path).model.dtype == torch.float32, "auto: as the file has it"


def test_the_special_tokens_are_those_that_the_file_names(gguf_file: Path) -> None:
    tokenizer = load_gguf_tokenizer(gguf_file)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|start|>", "<|end|>", "<|end|>")
    assert tokenizer.decode([0, 1], skip_special_tokens=True) == ""
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<|start|>x<|end|>"
