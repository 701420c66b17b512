"""Later loads map the panels of packed weights; panels that cannot be trusted are made anew and change no token."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mlserver_torch_stream.engine.model import PreparedModel
from mlserver_torch_stream.engine.native import panels_file
from mlserver_torch_stream.engine.native.weights import Packer
from tests.engine.full_disk import max_file_bytes
from tests.engine.test_native_compile import needs_permissions
from tests.engine.test_record import become_a_link, change_a_byte, cut, empty, loaded, logits, reasons, start
from tests.engine.tiny_gguf import write_tiny_gguf

_KINDS = ("Q8_0", "F16", "Q4_1")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", kinds=_KINDS, hidden=256)


@pytest.fixture
def cache(tmp_path: Path, folder: Path) -> Path:
    """A cache folder that contains only the kernels."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(folder / "kernels")
    return tmp_path / "cache"


def panels(cache: Path) -> list[Path]:
    return sorted((cache / "panels").glob("*.panels"))


def mappings() -> str:
    return Path("/proc/self/maps").read_text()


def test_a_later_start_maps_the_panels_and_packs_nothing(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, counts = loaded(model, cache, weights="packed")
    assert counts == {"new": 1}
    (file,) = panels(cache)
    changed = file.stat().st_ctime_ns
    monkeypatch.setattr(Packer, "pack", None)
    monkeypatch.setattr("mlserver_torch_stream.engine.native.weights.pack_groups", None)
    again, counts = loaded(model, cache, weights="packed")
    assert not counts and panels(cache) == [file]
    assert str(file) in mappings()
    assert file.stat().st_ctime_ns == changed  # in a layer of an image, a new time would copy the file
    assert torch.equal(logits(again), logits(first))


def rename_that_of_another_model(path: Path) -> None:
    """Puts the panels of a model of the same shapes in the place of this model's."""
    folder = path.parent.parent.parent
    other = write_tiny_gguf(folder / "other.gguf", seed=1, kinds=_KINDS, hidden=256)
    loaded(other, path.parent.parent, weights="packed")
    (its_own,) = {*panels(path.parent.parent)} - {path}
    digest = its_own.stem.rpartition("-")[2]
    its_own.rename(path.with_name(f"{path.stem.rpartition('-')[0]}-{digest}.panels"))
    path.unlink()


@pytest.mark.parametrize(
    "harm",
    [
        cut,
        change_a_byte,
        empty,
        lambda path: path.unlink(),
        lambda path: path.chmod(0o664),
        become_a_link,
        pytest.param(rename_that_of_another_model, marks=pytest.mark.long),
    ],
)
def test_panels_that_cannot_be_trusted_are_made_anew(harm: Callable[[Path], None], model: Path, cache: Path) -> None:
    expected = logits(loaded(model, cache, weights="packed")[0])
    (file,) = panels(cache)
    content = file.read_bytes()
    harm(file)
    again, counts = loaded(model, cache, weights="packed")
    assert not counts  # what the checks have found does not depend on the file
    assert torch.equal(logits(again), expected)
    assert content in [path.read_bytes() for path in panels(cache)]


def test_other_code_writes_panels_of_its_own_and_removes_the_old_ones(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(model, cache, weights="packed")
    old = panels(cache)
    unused, used = (cache / "panels" / f"{name}-0-0.panels" for name in ("unused", "used"))
    for path, age in ((unused, 31), (used, 29)):
        path.touch()
        os.utime(path, (path.stat().st_mtime - age * 24 * 3600,) * 2)
    monkeypatch.setattr(panels_file, "_layout", lambda: "other")
    loaded(model, cache, weights="packed")
    assert len(panels(cache)) == 2 and used in panels(cache) and old[0] not in panels(cache)


def test_panels_that_a_server_maps_are_neither_removed_nor_replaced(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other code packs anew, and so does a load whose record is gone."""
    first, _ = loaded(model, cache, weights="packed")
    (file,) = panels(cache)
    inode = file.stat().st_ino
    shutil.rmtree(cache / "records")
    second, counts = loaded(model, cache, weights="packed")
    assert counts == {"new": 1} and panels(cache) == [file] and file.stat().st_ino == inode
    monkeypatch.setattr(panels_file, "_layout", lambda: "other")
    third, _ = loaded(model, cache, weights="packed")
    assert file in panels(cache) and len(panels(cache)) == 2
    assert "(deleted)" not in "".join(line for line in mappings().splitlines() if str(cache) in line)
    assert torch.equal(logits(first), logits(second)) and torch.equal(logits(first), logits(third))
    del first, second, third
    monkeypatch.setattr(panels_file, "_layout", lambda: "third")
    loaded(model, cache, weights="packed")
    assert len(panels(cache)) == 1 and file not in panels(cache)


def test_panels_of_other_code_go_once_no_server_maps_them(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a rolling upgrade the old server maps its panels while the new one packs; later starts only read."""
    old, _ = loaded(model, cache, weights="packed")
    monkeypatch.setattr(panels_file, "_layout", lambda: "other")
    new, _ = loaded(model, cache, weights="packed")
    assert len(panels(cache)) == 2
    del old, new
    _again, counts = loaded(model, cache, weights="packed")
    (file,) = panels(cache)
    assert not counts and "-other-" in file.name and str(file) in mappings()


def test_panels_that_another_server_keeps_while_this_one_writes_are_not_replaced(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that start together pack for the same time; the digest of the panels takes seconds."""
    digest = panels_file._digest
    others: list[PreparedModel] = []

    def while_another_server_starts(*args: Any) -> str:
        monkeypatch.setattr(panels_file, "_digest", digest)
        others.append(loaded(model, cache, weights="packed")[0])
        return digest(*args)

    monkeypatch.setattr(panels_file, "_digest", while_another_server_starts)
    first, _ = loaded(model, cache, weights="packed")
    assert len(others) == len(panels(cache)) == 1
    assert "(deleted)" not in "".join(line for line in mappings().splitlines() if str(cache) in line)
    assert torch.equal(logits(first), logits(others[0]))


def test_files_that_cannot_be_removed_do_not_keep_a_load_from_its_panels(model: Path, cache: Path) -> None:
    (cache / "panels" / "folder-0-0.panels").mkdir(parents=True)
    (cache / "panels" / "link-0-0.panels").symlink_to("nowhere")
    os.utime(cache / "panels" / "folder-0-0.panels", (1, 1))
    _prepared, _ = loaded(model, cache, weights="packed")
    (file,) = (path for path in panels(cache) if path.is_file())
    assert str(file) in mappings()


def test_what_a_killed_start_has_written_is_removed_by_a_start_that_writes_nothing(model: Path, cache: Path) -> None:
    loaded(model, cache, weights="packed")
    killed, running = (cache / "panels" / f".writing-{name}" for name in ("killed", "running"))
    for place in (killed, running):
        place.mkdir()
        (place / "made.panels").write_bytes(b"abc")
    os.utime(killed, (killed.stat().st_mtime - 25 * 3600,) * 2)
    assert not loaded(model, cache, weights="packed")[1]
    assert not killed.exists() and running.exists()


def test_panels_are_not_written_where_no_later_start_would_use_them(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cache / "panels").mkdir()
    (cache / "panels").chmod(0o777)
    with caplog.at_level(logging.INFO, "mlserver_torch_stream"):
        open_to_all, _ = loaded(model, cache, weights="packed")
    assert not panels(cache) and "every user can replace it" in caplog.text
    (cache / "panels").chmod(0o755)
    assert torch.equal(logits(loaded(model, cache, weights="packed")[0]), logits(open_to_all))
    assert len(panels(cache)) == 1


def test_a_full_disk_costs_only_the_panels(model: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = logits(loaded(model, cache, weights="packed")[0])
    (file,) = panels(cache)
    size = file.stat().st_size
    file.unlink()
    with caplog.at_level(logging.INFO, "mlserver_torch_stream"), max_file_bytes(size - 1):
        assert torch.equal(logits(loaded(model, cache, weights="packed")[0]), expected)
    assert not panels(cache) and "panels cannot be written: File too large" in caplog.text


def test_a_file_that_was_moved_is_not_converted_or_packed_into_a_second_folder(
    model: Path, cache: Path, tmp_path: Path
) -> None:
    expected = logits(loaded(model, cache, weights="packed")[0])
    kept = panels(cache)
    (tmp_path / "moved").mkdir()
    moved = model.rename(tmp_path / "moved" / model.name)
    assert torch.equal(logits(loaded(moved, cache, weights="packed")[0]), expected)
    assert panels(cache) == kept and len(list(cache.glob("tiny-*.lock"))) == 1
    os.utime(moved, (1, 1))
    assert loaded(moved, cache, weights="packed")[1] == {"weights": 1}
    assert len(panels(cache)) == 1 and panels(cache) != kept, "a file that was touched is packed again"


@pytest.mark.slow
def test_two_servers_may_pack_at_once(model: Path, cache: Path) -> None:
    loaded(model, cache, weights="packed")
    panels(cache)[0].unlink()
    both = [start(model, cache, weights="packed") for _ in range(2)]
    assert [reasons(process) for process in both] == ["", ""]
    assert len(panels(cache)) == 1


@pytest.mark.slow
@needs_permissions
def test_a_folder_that_may_only_be_read_is_used_and_without_panels_the_weights_are_packed_in_memory(
    model: Path, cache: Path
) -> None:
    loaded(model, cache, weights="packed")
    folder = cache / "panels"
    folder.chmod(0o555)
    try:
        assert reasons(start(model, cache, weights="packed")) == ""
        folder.chmod(0o755)
        panels(cache)[0].unlink()
        folder.chmod(0o555)
        assert reasons(start(model, cache, weights="packed")) == ""
        assert not panels(cache)
    finally:
        folder.chmod(0o755)
