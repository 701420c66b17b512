"""Which peers get which weights, and how they are started. None of them is installed here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import bench_peers
from benchmarks.model_folder import NoFolder, gguf_file
from benchmarks.peers import PEERS
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.vllm_cpu import VllmCpu


def test_all_peers_are_asked_with_bf16_and_those_that_read_gguf_files_with_others() -> None:
    assert bench_peers.parse([]).peers == tuple(PEERS)
    assert bench_peers.parse(["--weights", "Q8_0"]).peers == ("llama.cpp", "openvino")


def test_a_peer_that_reads_no_gguf_files_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_peers.parse(["--weights", "Q4_1", "--peers", "vllm"])
    assert "no peer 'vllm' that reads Q4_1; known are llama.cpp, openvino" in capsys.readouterr().err


def test_a_gguf_file_takes_the_place_of_the_converted_weights(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp_python-0" / "vendor" / "llama.cpp").mkdir(parents=True)
    given = tmp_path / "some.gguf"
    assert str(given) in LlamaCpp(tmp_path, tmp_path / "model", weights=given).command(tmp_path, 1)
    assert str(tmp_path / "model-bf16.gguf") in LlamaCpp(tmp_path, tmp_path / "model").command(tmp_path, 1)


def test_vllm_gets_all_cores_and_its_openmp(tmp_path: Path) -> None:
    openmp = tmp_path / "venv" / "lib" / "libiomp5.so"
    openmp.parent.mkdir(parents=True)
    openmp.touch()
    environment = VllmCpu(tmp_path, tmp_path).environment()
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert str(openmp) in environment["LD_PRELOAD"].split(":")


def test_only_a_gguf_file_is_given_to_others_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    assert gguf_file(str(file)) == file
    with pytest.raises(NoFolder, match="is no GGUF file"):
        gguf_file(str(tmp_path / "folder"))
