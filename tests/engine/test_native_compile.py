"""Kernels are compiled once and stored completely; a failure is one line that says why, and never a crash."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mlserver_torch_stream.engine.build import build_engine
from mlserver_torch_stream.engine.native import compile_kernels as compiling
from mlserver_torch_stream.engine.native.compile_kernels import NoKernels, compiled_library
from mlserver_torch_stream.engine.native.library import open_library
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.settings import parse_settings
from tests.engine.kernels import kernels_of
from tests.engine.tiny import tiny_model as make_tiny_model

# A process of root's may write anywhere, unless it gives that up.
bound = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
needs_permissions = pytest.mark.skipif(bool(bound) and shutil.which("setpriv") is None, reason="root without setpriv")

_OPEN = """
import pathlib, sys
from mlserver_torch_stream.engine.native.compile_kernels import compiled_library
from mlserver_torch_stream.engine.native.library import open_library
compiled_library(pathlib.Path(sys.argv[1]), open_library).native_step
"""


def open_in_a_process(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [*bound, sys.executable, "-c", _OPEN, str(cache)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def check_opens(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        _, complaints = process.communicate(timeout=240)
        assert process.returncode == 0, complaints


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "kernels").iterdir())


def replace(library: Path, content: bytes) -> None:
    """Replaces the file rather than its content, so that mappings of the old file stay valid in this process."""
    library.unlink()
    library.write_bytes(content)


def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


def compiler_that(does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{does}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


@pytest.fixture
def quick(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the compiler by one that only copies a library that was compiled before."""
    library = compiled_library(folder, lambda path: path)  # other tests may have compiled for other CPUs
    compiler_that(f'for last; do :; done; cp {library} "$last"', tmp_path, monkeypatch)


@pytest.fixture
def cache(quick: None, tmp_path: Path) -> Path:
    """A cache folder that contains the kernels."""
    compiled_library(tmp_path / "cache", open_library)
    return tmp_path / "cache"


def test_a_library_is_compiled_once_for_the_same_sources_and_the_log_says_when(
    quick: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cache = tmp_path / "cache"
    first = compiled_library(cache, lambda path: path.exists())
    (library,) = kept(cache)  # nothing is left lying about
    assert first and compiled_library(cache, lambda path: path) == library
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2 and "Compiling the kernels" in lines[0] and "took" in lines[1], lines


def test_old_libraries_and_the_folders_of_killed_processes_are_removed(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels"
    for age in range(1, 4):
        library, place = folder / f"decoder-{age}-0-0.so", folder / f".compiling-{age}"
        place.mkdir(parents=True)
        (place / "decoder.so").write_bytes(b"")
        library.write_bytes(b"")
        for path in (library, place):
            os.utime(path, (time.time() - (age - 0.5) * 24 * 3600,) * 2)
    monkeypatch.setattr(compiling, "MAX_LIBRARIES", 3)
    compiled_library(tmp_path, lambda path: path)
    left = {path.name for path in kept(tmp_path)}
    assert {".compiling-1", "decoder-1-0-0.so", "decoder-2-0-0.so"} < left and len(left) == 4


def test_a_library_that_is_open_is_neither_removed_nor_replaced(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MAX_LIBRARIES", 1)
    compiled_library(tmp_path, lambda path: path)
    (library,) = kept(tmp_path)
    os.utime(library, (1, 1))
    for target in (("-march=x86-64-v3",), ("-march=x86-64-v2",)):
        compiled_library(tmp_path, lambda path: path, target)
    assert library in kept(tmp_path) and len(kept(tmp_path)) == 3, "this process has opened all of them"
    place = tmp_path / "elsewhere" / library.name
    place.parent.mkdir()
    library.rename(place)
    made_by_another = f'cp {place} {library}; for last; do :; done; cp {place} "$last"'
    compiler_that(made_by_another, tmp_path, monkeypatch)
    assert compiled_library(tmp_path, lambda path: path) == library


@pytest.mark.long
def test_several_processes_may_compile_at_once(quick: None, tmp_path: Path) -> None:
    check_opens(*(open_in_a_process(tmp_path / "cache") for _ in range(2)))
    assert len(kept(tmp_path / "cache")) == 1


@pytest.mark.parametrize(
    "left",
    [
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(5000, marks=pytest.mark.slow),
        pytest.param(0.5, marks=pytest.mark.long),
    ],
)
def test_a_library_that_was_cut_is_compiled_anew_and_ends_no_process(cache: Path, left: float) -> None:
    """Reading a mapped page beyond the end of its file ends the process by SIGBUS, so the test starts another one."""
    (library,) = kept(cache)
    whole = library.read_bytes()
    replace(library, whole[: int(left * len(whole)) if left < 1 else int(left)])
    check_opens(open_in_a_process(cache))
    (library,) = kept(cache)
    assert len(library.read_bytes()) == len(whole)


@pytest.mark.parametrize("damage", ["garbage", "zeros at the end"])
def test_a_damaged_library_is_compiled_anew(cache: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    (library,) = kept(cache)
    whole = library.read_bytes()
    size = len(whole)
    replace(library, os.urandom(size) if damage == "garbage" else whole[:-8192].ljust(size, b"\0"))
    assert compiled_library(cache, open_library).native_step
    assert "damaged" in caplog.text
    caplog.clear()
    assert compiled_library(cache, open_library).native_step
    assert not caplog.records, "what was compiled is whole"


def test_kernels_that_are_there_need_no_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_compiler(monkeypatch, tmp_path)
    with torch.inference_mode():
        assert not isinstance(kernels_of(make_tiny_model(), cache), str)
    compiler_that("exit 1", tmp_path, monkeypatch)
    assert compiled_library(cache, open_library).native_step
    (library,) = kept(cache)
    replace(library, library.read_bytes()[:5000])
    with pytest.raises(NoKernels, match="ended with status 1"):
        compiled_library(cache, open_library)


def test_a_library_that_does_not_open_here_is_compiled_anew(cache: Path) -> None:
    """Its checksum is right, but it may be from a machine with a newer C++ library."""
    refused: list[Path] = []

    def open_new_ones(path: Path) -> ctypes.CDLL:
        if not refused:
            refused.append(path)
            raise NoKernels("GLIBCXX_3.4.99 not found")
        return open_library(path)

    assert compiled_library(cache, open_new_ones).native_step
    assert refused == kept(cache)


@pytest.mark.long
@needs_permissions
def test_a_cache_that_may_only_be_read_is_used_and_where_it_is_damaged_kernels_are_for_this_start(cache: Path) -> None:
    (library,) = kept(cache)
    library.chmod(0o444)
    library.parent.chmod(0o555)
    check_opens(open_in_a_process(cache))
    library.parent.chmod(0o755)
    replace(library, library.read_bytes()[:5000])
    library.chmod(0o444)
    library.parent.chmod(0o555)
    check_opens(open_in_a_process(cache))
    assert kept(cache) == [library] and library.stat().st_size == 5000
    library.chmod(0o000)  # another user's, with a strict umask
    check_opens(open_in_a_process(cache))
    library.parent.chmod(0o755)


def test_without_a_compiler_transformers_runs_and_a_warning_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_compiler(monkeypatch, tmp_path)
    with torch.inference_mode():
        assert kernels_of(make_tiny_model(), tmp_path) == "no C++ compiler"
    (warning,) = caplog.records
    assert (
        warning.levelname == "WARNING"
        and "our own kernels are not used" in warning.message
        and "no C++ compiler" in warning.message
    )


def test_the_summary_of_a_load_names_the_forward_and_why(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_compiler(monkeypatch, tmp_path)
    caplog.set_level(logging.INFO)
    extra = {"cache_dir": str(tmp_path / "cache"), "threads": 1}
    built = build_engine(parse_settings(str(tiny_model), extra, environ={}), resources=ProcessResources())
    built.shutdown()
    assert "transformers' forward (no C++ compiler)" in built.summary
    assert any(line.startswith("Checking ") and "took" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ('echo "x.cpp:1: error: no such CPU" >&2; exit 1', "ended with status 1: x.cpp:1: error: no such CPU"),
        (
            'echo "ld: final link failed: No space left on device\ncollect2: error: ld returned 1" >&2; exit 1',
            "ended with status 1: ld: final link failed: No space left on device",
        ),
        ("exit 3", "ended with status 3: it printed no error"),
        ("kill -9 $$", "was killed by SIGKILL: it printed no error"),
        ('echo "cannot exec cc1plus" >&2; exit 1', "ended with status 1: cannot exec cc1plus"),
        ("sleep 300", "took more than 0.5 s"),
    ],
)
def test_why_a_compiler_failed_is_said(does: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like cc1plus, the sleep is a child of the compiler; if it is not ended as well, the test has to wait for it."""
    compiler_that(does, tmp_path, monkeypatch)
    with pytest.raises(NoKernels, match=told):
        compiled_library(tmp_path / "cache", open_library, seconds=0.5)


def test_a_compiler_that_cannot_be_started_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_that("", tmp_path, monkeypatch)
    (tmp_path / "broken").write_text("no program")
    with pytest.raises(NoKernels, match=r"broken cannot be started: Exec format error"):
        compiled_library(tmp_path / "cache", open_library)


def test_a_cache_folder_that_cannot_be_written_costs_a_warning(
    quick: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert compiled_library(blocked, open_library).native_step
    assert "for this start only" in caplog.text and "cannot be written" in caplog.text


def test_kernels_are_not_compiled_where_others_could_replace_them_or_the_disk_is_full(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (others := tmp_path / "others").mkdir()
    others.chmod(0o777)
    full = tmp_path / "full"
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0) if full in path.parents else free)
    for cache, why in ((others, "every user can replace it"), (full, "No space left on device")):
        caplog.clear()
        library = compiled_library(cache, lambda path: path)
        assert tmp_path not in library.parents and not kept(cache) and why in caplog.text
        caplog.clear()
        again = compiled_library(cache, lambda path: path)
        assert tmp_path not in again.parents and not caplog.records, "it is compiled once"


@pytest.mark.skipif(not hasattr(os, "ST_NOEXEC"), reason="the system does not tell")
def test_kernels_are_not_compiled_where_a_file_system_is_mounted_noexec(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mounted, statvfs = tmp_path / "mounted", os.statvfs
    compiled_library(mounted, lambda path: path)  # before the file system was mounted so

    def with_noexec(path: Path) -> os.statvfs_result:
        found = statvfs(path)
        return os.statvfs_result((*found[:8], found.f_flag | os.ST_NOEXEC * (mounted in path.parents), found[9]))

    monkeypatch.setattr(os, "statvfs", with_noexec)
    library = compiled_library(mounted, lambda path: path)
    assert tmp_path not in library.parents
    (line,) = caplog.messages
    assert "for this start only" in line and "is mounted noexec; set cache_dir to a folder on another one" in line
    caplog.set_level(logging.INFO)
    again = compiled_library(mounted, lambda path: path)
    assert library.parents[1] == again.parent and caplog.messages == [line], "it is compiled once"
    monkeypatch.setattr(tempfile, "tempdir", str(mounted / "tmp"))
    (mounted / "tmp").mkdir()
    with pytest.raises(NoKernels, match=r"set cache_dir .*tmp is mounted noexec, too"):
        compiled_library(mounted / "other", lambda path: path)
    assert not list((mounted / "tmp").iterdir()) and not kept(mounted / "other")


def test_other_flags_sources_or_cpus_make_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiling._fingerprint(compiling.THIS_CPU)
    assert compiling._fingerprint(("-march=x86-64-v3",)) != before
    monkeypatch.setattr(compiling, "cpu_properties", lambda: "another CPU")
    assert compiling._fingerprint(compiling.THIS_CPU) != before
