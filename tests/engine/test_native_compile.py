"""Compiling the kernels: once, also when two do it at a time, and every failure is one line and no crash."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mlserver_torch_stream.engine.native import compile as compiling
from mlserver_torch_stream.engine.native.compile import NoKernels, compiled_library
from mlserver_torch_stream.engine.native.take import take_fast_path
from tests.engine.tiny import tiny_model

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@needs_compiler
def test_a_library_is_compiled_once_for_the_same_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled_library(tmp_path)
    monkeypatch.setattr(compiling, "_compile", lambda *args: pytest.fail("compiled again"))
    assert compiled_library(tmp_path) == first
    assert [path.name for path in first.parent.iterdir()] == [first.name]  # nothing is left lying about


@needs_compiler
def test_two_processes_may_compile_at_once(tmp_path: Path) -> None:
    code = (
        "import sys, ctypes, pathlib;"
        "from mlserver_torch_stream.engine.native.compile import compiled_library;"
        "ctypes.CDLL(str(compiled_library(pathlib.Path(sys.argv[1])))).native_step"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]


def test_without_a_compiler_transformers_runs_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with torch.inference_mode(), caplog.at_level(logging.INFO):
        assert take_fast_path(tiny_model(), 1, tmp_path) is None
    assert "no fast path" in caplog.text and "no C++ compiler" in caplog.text


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.cpp:1: error: no such CPU" >&2; exit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NoKernels, match="no such CPU"):
        compiled_library(tmp_path)


def test_a_cache_folder_that_cannot_be_written_is_no_crash(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(NoKernels, match="cache folder"):
        compiled_library(blocked)


@needs_compiler
def test_other_flags_or_sources_make_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiling._compiler()
    before = compiling._fingerprint(compiler)
    monkeypatch.setattr(compiling, "_cpu", lambda: "another CPU")
    assert compiling._fingerprint(compiler) != before
