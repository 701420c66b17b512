"""The record of what a load has proved: when it is used and when not, and that the logits are the same either way."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mlserver_torch_stream.engine import model as model_module
from mlserver_torch_stream.engine.checks import record
from mlserver_torch_stream.engine.fingerprint import checksum
from mlserver_torch_stream.engine.kept_files import replaceable
from mlserver_torch_stream.engine.loading.loader import LoadedWeights
from mlserver_torch_stream.engine.loading.locate import locate, locate_packed
from mlserver_torch_stream.engine.model import ModelLoad, PreparedModel, prepare
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
from tests.engine.full_disk import max_file_bytes
from tests.engine.page_book import prefilled
from tests.engine.test_native_compile import bound, needs_permissions
from tests.engine.tiny import tiny_model as make_tiny_model

PROMPT = [5, 6, 7, 100, 31, 77]
_LOAD = """
import json, sys
from pathlib import Path
from tests.engine.test_record import loaded
print(*loaded(Path(sys.argv[1]), Path(sys.argv[2]), **json.loads(sys.argv[3]))[1])
"""


def loaded(model: Path, cache: Path, **extra: object) -> tuple[PreparedModel, dict[str, int]]:
    """Returns the prepared model of a load, and the counts of loads by the reason why the weights were checked."""
    resolved = parse_settings(str(model), {"cache_dir": str(cache), **extra}, environ={})
    resources = ProcessResources()
    return prepare(locate_packed(resolved) or locate(resolved), ModelLoad(resolved, 1, resources)), resources.checks


def logits(prepared: PreparedModel) -> torch.Tensor:
    assert prepared.choice is not None
    with torch.inference_mode():
        return prefilled(prepared.choice.forward, prepared.weights.model, PROMPT, chunk=4)[0].clone()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def cache(tmp_path: Path, folder: Path) -> Path:
    """A cache folder that contains only the kernels."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(folder / "kernels")
    return tmp_path / "cache"


def records(cache: Path) -> list[Path]:
    return sorted((cache / "records").iterdir())


@pytest.mark.parametrize("extra", [{}, {"weights": "int8"}, {"weights": "int4"}])
def test_a_later_start_builds_no_model_and_has_the_same_bits(
    extra: dict[str, object],
    model: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proved, counts = loaded(model, cache, **extra)
    assert counts == {"new": 1}
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    with caplog.at_level(logging.INFO, "mlserver_torch_stream"):
        again, counts = loaded(model, cache, **extra)
    assert not counts and "was checked by an earlier start" in caplog.text and "Checking" not in caplog.text
    assert isinstance(again.weights.model, record.ModelOutline)
    assert torch.equal(logits(again), logits(proved))
    assert again.findings == proved.findings and again.placement == proved.placement
    assert again.weights.description == proved.weights.description
    assert again.weights.generation_config.to_dict() == proved.weights.generation_config.to_dict()


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def become_a_link(path: Path) -> None:
    os.symlink(path.rename(path.with_suffix(".moved")), path)


def let_a_group_write_to_the_folder(path: Path) -> None:
    os.chown(path.parent, 0, 12345)
    path.parent.chmod(0o775)


@pytest.mark.long
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (cut, "damaged"),
        (change_a_byte, "damaged"),
        (empty, "damaged"),
        (lambda path: path.chmod(0o664), "foreign"),
        (lambda path: path.chmod(0o646), "foreign"),
        (lambda path: path.parent.chmod(0o777), "foreign"),
        (lambda path: path.parent.parent.chmod(0o777), "foreign"),
        pytest.param(
            let_a_group_write_to_the_folder,
            "foreign",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
        (become_a_link, "foreign"),
        pytest.param(
            lambda path: os.chown(path, 12345, 12345),
            "foreign",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
    ],
)
def test_a_record_that_cannot_be_trusted_is_proved_anew(
    harm: Callable[[Path], None], reason: str, model: Path, cache: Path
) -> None:
    proved, _ = loaded(model, cache)
    harm(records(cache)[0])
    again, counts = loaded(model, cache)
    assert counts == {reason: 1}
    assert torch.equal(logits(again), logits(proved))


def test_a_wrong_byte_of_a_large_record_is_found(model: Path, cache: Path) -> None:
    """The norms of a model of 8 billion parameters take more than 1 MiB."""
    loaded(model, cache)
    (first,) = records(cache)
    key = record.RecordKey(*first.stem.split("-")[:4])
    proved = record.read_record(key, cache)
    assert isinstance(proved, record.ProvedLoad)
    first.unlink()
    own = {**proved.plan.own, "large": torch.zeros(2**20)}
    record.write_record(key, replace(proved, plan=replace(proved.plan, own=own)), cache)
    (large,) = records(cache)
    content, samples = bytearray(large.read_bytes()), checksum(large)
    content[(len(content) - 4096) * 128 // 255 + 8192] ^= 1
    large.write_bytes(content)
    assert checksum(large) == samples
    assert record.read_record(key, cache) is record.Anew.DAMAGED and not records(cache)


def test_a_record_that_was_renamed_is_not_used(model: Path, cache: Path, tmp_path: Path) -> None:
    """A renamed record keeps its owner, its mode and its checksum, and a model of the same shapes would load it."""
    loaded(model, cache)
    (first,) = records(cache)
    make_tiny_model("llama", seed=2, rms_norm_eps=0.1).to(torch.bfloat16).save_pretrained(tmp_path / "other")
    expected = logits(loaded(tmp_path / "other", cache)[0])
    (other,) = {*records(cache)} - {first}
    first.rename(other.with_stem(f"{other.stem.rpartition('-')[0]}-{first.stem.rpartition('-')[2]}"))
    other.unlink()
    again, counts = loaded(tmp_path / "other", cache)
    assert counts == {"damaged": 1}
    assert torch.equal(logits(again), expected)


def touch_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(model / "model.safetensors", (1, 1))


def touch_config(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(model / "config.json", (1, 1))


def train_on_and_keep_the_times(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {path: path.stat() for path in model.iterdir()}
    make_tiny_model("llama", seed=2).to(torch.bfloat16).save_pretrained(model)
    for path, before in times.items():
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size


def edit_a_config_and_keep_its_size_and_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model / "config.json"
    before, text = config.stat(), config.read_text()
    config.write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-01'))
    os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert config.read_text() != text and config.stat().st_size == before.st_size


def change_code(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_code", lambda: "other")


def change_chip(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "cpu_properties", lambda: "another CPU")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (touch_weights, "weights"),
        (touch_config, "weights"),
        (train_on_and_keep_the_times, "weights"),
        (edit_a_config_and_keep_its_size_and_time, "weights"),
        (change_code, "code"),
        (change_chip, "chip"),
    ],
)
def test_a_record_of_something_else_is_not_used(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
    model: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded(model, cache)
    change(model, monkeypatch)
    with caplog.at_level(logging.INFO, "mlserver_torch_stream"):
        again, counts = loaded(model, cache)
    assert counts == {reason: 1}
    assert f"is checked again: {record.Anew[reason.upper()].value}" in caplog.text
    assert torch.equal(logits(again), logits(loaded(model, cache)[0]))


def test_other_settings_have_a_record_of_their_own(model: Path, cache: Path) -> None:
    assert [loaded(model, cache, **extra)[1] for extra in ({}, {"weights": "int8"}, {}, {"weights": "int8"})] == [
        {"new": 1},
        {"new": 1},
        {},
        {},
    ]


def test_the_number_of_records_is_bounded_and_the_oldest_goes(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "MAX_RECORDS", 2)
    loaded(model, cache)
    first = records(cache)[0]
    os.utime(first, (1, 1))
    for weights in ("int8", "int4"):
        loaded(model, cache, weights=weights)
    assert len(records(cache)) == 2 and first not in records(cache)


def other_model(model: Path) -> None:
    """Replaces the model by another of the same shapes, whose files have other times."""
    make_tiny_model("llama", seed=2, rms_norm_eps=0.1).to(torch.bfloat16).save_pretrained(model)


def test_a_model_that_is_replaced_while_it_is_checked_is_refused_and_not_recorded(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load_weights = model_module.load_weights

    def replaced_before(*args: Any) -> LoadedWeights:
        other_model(model)
        return load_weights(*args)

    monkeypatch.setattr(model_module, "load_weights", replaced_before)
    with pytest.raises(LoadFailed, match=r"model/\w+\.(json|safetensors): it has changed while it was loaded"):
        loaded(model, cache)
    assert not (cache / "records").exists() and "not recorded: its files have changed" in caplog.text


@pytest.mark.parametrize(("name", "refused"), [("tokenizer.json", True), ("server.log", False)])
def test_a_model_whose_tokenizer_changes_after_it_was_found_is_refused(
    name: str, refused: bool, model: Path, cache: Path
) -> None:
    """The record has only the weights. A log in the model's folder may grow during the load."""
    loaded(model, cache)
    resolved = parse_settings(str(model), {"cache_dir": str(cache)}, environ={})
    files = locate(resolved)
    (model / name).write_text("another")
    with pytest.raises(LoadFailed, match=f"{name}: it has changed") if refused else nullcontext():
        prepare(files, ModelLoad(resolved, 1, ProcessResources()))


def test_a_model_that_is_replaced_while_its_record_is_read_is_refused(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(model, cache)

    def replaced_after(*args: Any) -> object:
        result = record.read_record(*args)
        other_model(model)
        return result

    monkeypatch.setattr(model_module, "read_record", replaced_after)
    with pytest.raises(LoadFailed, match="it has changed while it was loaded"):
        loaded(model, cache)
    monkeypatch.undo()
    assert loaded(model, cache)[1] == {"weights": 1}


def test_a_generation_config_that_json_cannot_store_is_not_recorded(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model / "generation_config.json").write_text('{"watermarking_config": {"bias": 2.5}}')
    with caplog.at_level(logging.INFO, "mlserver_torch_stream"):
        assert [loaded(model, cache)[1] for _ in range(2)] == [{"new": 1}] * 2
    assert "not recorded: its generation config cannot be written as JSON" in caplog.text


def test_a_full_disk_costs_only_the_record(model: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = logits(loaded(model, cache)[0])
    (kept,) = records(cache)
    size = kept.stat().st_size
    kept.unlink()
    with caplog.at_level(logging.INFO, "mlserver_torch_stream"), max_file_bytes(size - 1):
        assert torch.equal(logits(loaded(model, cache)[0]), expected)
    assert not records(cache) and "records cannot be written: File too large" in caplog.text


def test_a_record_that_nobody_would_trust_is_not_written(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cache / "records").mkdir()
    (cache / "records").chmod(0o777)
    loaded(model, cache)
    assert not records(cache) and "not recorded in" in caplog.text and "every user can replace it" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize(
    ("mode", "owner", "who"),
    [
        (0o1777, 0, None),
        (0o1777, 12345, "the user 12345, who owns the folder, can replace it"),
        (0o0777, 12345, "every user can replace it"),
        (0o0755, 12345, None),
    ],
)
def test_the_owner_of_a_folder_to_which_all_users_can_write_must_be_trusted(
    mode: int, owner: int, who: str | None, tmp_path: Path
) -> None:
    """The owner can replace files of other users in spite of the sticky bit. A volume may have any owner."""
    (folder := tmp_path / "records").mkdir()
    folder.chmod(mode)
    os.chown(folder, owner, owner)
    assert replaceable(folder) == who


def start(model: Path, cache: Path, **extra: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [*bound, sys.executable, "-c", _LOAD, str(model), str(cache), json.dumps(extra)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def reasons(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return said.strip()


@pytest.mark.slow
def test_two_servers_may_prove_at_once(model: Path, cache: Path) -> None:
    both = [start(model, cache) for _ in range(2)]
    assert {reasons(process) for process in both} <= {"new", ""}
    assert len(records(cache)) == 1
    assert not loaded(model, cache)[1]


@pytest.mark.slow
@needs_permissions
def test_a_folder_that_may_only_be_read_is_used_and_where_it_has_no_record_the_load_is_proved_each_time(
    model: Path, cache: Path
) -> None:
    cache.chmod(0o555)
    try:
        assert reasons(start(model, cache)) == "new"
        assert reasons(start(model, cache)) == "new"
        cache.chmod(0o755)
        assert reasons(start(model, cache)) == "new"
        (cache / "records").chmod(0o555)
        cache.chmod(0o555)
        assert reasons(start(model, cache)) == ""
    finally:
        cache.chmod(0o755)
        (cache / "records").chmod(0o755)
