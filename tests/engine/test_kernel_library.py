"""Which kernels are used: the wheel's variant that suits the CPU best, or kernels that are compiled here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlserver_torch_stream.engine.native.compile_kernels import NoKernels
from mlserver_torch_stream.engine.native.kernel_library import VARIABLE, open_kernels
from mlserver_torch_stream.engine.native.kernel_variants import VARIANTS, runnable
from mlserver_torch_stream.errors import LoadFailed
from tests.engine.kernels import kernels_of
from tests.engine.tiny_models import tiny_model

needs_variants = pytest.mark.skipif(len(runnable()) < 2, reason="this CPU runs fewer than two variants")


def opened(path: Path) -> str:
    """Returns the content of a file that stands for a library; an empty one does not load here."""
    text = path.read_text()
    if not text:
        raise NoKernels("it is for another C library")
    return text


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A folder with prebuilt libraries as in a wheel: the content of each is the name of its variant."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    for variant in VARIANTS:
        (folder / variant.file_name).write_text(variant.name)
    return folder


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


@needs_variants
def test_the_best_of_a_wheel_is_taken_and_a_useless_one_passed_over(wheel: Path, no_compiler: None) -> None:
    best, second = (variant.name for variant in runnable()[:2])
    assert open_kernels(wheel, opened, {}, wheel) == (best, f"{best}, prebuilt")
    (wheel / runnable()[0].file_name).write_text("")
    assert open_kernels(wheel, opened, {}, wheel) == (second, f"{second}, prebuilt")


@needs_variants
def test_the_named_one_is_taken(wheel: Path, no_compiler: None) -> None:
    name = runnable()[-1].name
    assert open_kernels(wheel, opened, {VARIABLE: name}, wheel) == (name, f"{name}, prebuilt")


def test_without_libraries_and_without_a_compiler_there_are_no_kernels(tmp_path: Path, no_compiler: None) -> None:
    with pytest.raises(NoKernels, match="no C\\+\\+ compiler"):
        open_kernels(tmp_path, opened, {}, tmp_path / "prebuilt")


def test_a_name_that_this_cpu_does_not_run_is_refused(wheel: Path) -> None:
    with pytest.raises(LoadFailed, match=f"{VARIABLE}: 'avx22' is not a variant of the kernels; did you mean 'avx2'"):
        open_kernels(wheel, opened, {VARIABLE: "avx22"}, wheel)
    foreign = next(variant.name for variant in VARIANTS if variant not in runnable())
    with pytest.raises(LoadFailed, match=f"{VARIABLE}: this CPU does not run the variant '{foreign}'"):
        open_kernels(wheel, opened, {VARIABLE: foreign}, wheel)


def test_a_model_is_not_loaded_with_other_kernels_than_the_named_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "avx22")
    with pytest.raises(LoadFailed, match=VARIABLE):
        kernels_of(tiny_model("llama"), tmp_path)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@needs_variants
def test_what_the_wheel_lacks_is_compiled_with_the_options_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is a script that writes its options to the output file."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nfor last; do :; done\necho "$@" > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    variant = runnable()[-1]
    options, name = open_kernels(tmp_path, opened, {VARIABLE: variant.name}, tmp_path / "prebuilt")
    assert name == f"{variant.name}, compiled here" and set(variant.options) <= set(options.split())
    options, name = open_kernels(tmp_path, opened, {}, tmp_path / "prebuilt")
    assert name == "compiled for this CPU" and "-march=native" in options.split()
