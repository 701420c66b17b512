"""Which peers get which weights, and how they are started. None of them is installed here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from benchmarks import bench_peers
from benchmarks.model_folder import NoFolder, gguf_file
from benchmarks.peers import PEERS
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.vllm_cpu import OursVllm, VllmCpu
from benchmarks.shapes import SHAPES, Shape, written
from tests import plain_http
from tests.engine.wire_worker import interpreter


def test_all_peers_are_asked_with_bf16_and_those_that_read_gguf_files_with_others() -> None:
    assert bench_peers.parse([]).peers == tuple(PEERS)
    assert bench_peers.parse(["--format", "q8_0"]).peers == ("llama.cpp", "openvino")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--format", "own", "--peers", "vllm"], "'vllm' reads no GGUF files; those that do are llama.cpp, openvino"),
        (["--format", "q5"], "--format: 'q5' is not one of bf16, q8_0, q4_0, q4_k, q4_k_m, q6_k, own"),
        (["--shape", "1.5B,2B"], "--shape: '2B' is not one of"),
        (["--shape", "1.5B", "--format", "own"], "--format own: cannot be combined with --shape"),
        (["--peers", "torchserve", "--shape", "1.5B"], "--shape: cannot be combined with --peers torchserve"),
        (["--peers", "torchserve", "--format", "q8_0"], "'q8_0' is not one of h1-stream, h1-whole, h16-stream,"),
    ],
)
def test_what_there_is_not_is_refused_by_name(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_peers.parse(arguments)
    assert said in capsys.readouterr().err


def test_streams_shapes_and_formats_are_rows_of_the_table() -> None:
    options = bench_peers.parse(["--shape", "0.5B,1.5B", "--format", "bf16,q8_0", "--streams", "1,4,16"])
    assert (options.shape, options.format) == (("0.5B", "1.5B"), ("bf16", "q8_0"))
    assert options.cases == ("c1", "c4", "c16", "p128", "p2000") == bench_peers.parse(["--shape", "3B"]).cases
    assert bench_peers.parse([]).cases == ("c1", "c4", "c16", "c32", "p128", "p2000")


def test_a_handlers_batch_size_and_way_of_answering_are_its_formats() -> None:
    options = bench_peers.parse(["--peers", "torchserve"])
    assert options.format == ("h1-stream", "h1-whole", "h16-stream", "h16-whole", "requests")
    assert options.cases == ("c1", "c4", "c16", "r1", "r20000")
    assert (options.scale.prompt_tokens, options.scale.new_tokens) == (32, 16)
    options = bench_peers.parse(["--peers", "torchserve", "--streams", "1,4", "--new-tokens", "8"])
    assert options.cases == ("c1", "c4") and "requests" not in options.format and options.scale.new_tokens == 8


def test_a_shape_has_the_size_of_its_name_and_is_removed_after(tiny_model: Path, tmp_path: Path) -> None:
    for name, shape in SHAPES.items():
        assert shape.parameters(49152) / 1e9 == pytest.approx(float(name[:-1]), rel=0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", Shape(32, 48, 2, 4, 2))
        with written("tiny", tmp_path, tiny_model) as folder:
            model = AutoModelForCausalLM.from_pretrained(folder)
            vocabulary = model.config.vocab_size
            counted = model.num_parameters() - 5 * 32  # norms
            assert counted == SHAPES["tiny"].parameters(vocabulary)
            (tmp_path / "peer").mkdir()
            (tmp_path / "peer" / f"{folder.name}-q8_0.gguf").touch()
    assert not list(tmp_path.rglob("llama-*"))


def test_a_gguf_file_takes_the_place_of_the_converted_weights(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp_python-0" / "vendor" / "llama.cpp").mkdir(parents=True)
    given = tmp_path / "some.gguf"
    assert str(given) in LlamaCpp(tmp_path, tmp_path / "model", weights=given).command(tmp_path, 1)
    assert str(tmp_path / "model-bf16.gguf") in LlamaCpp(tmp_path, tmp_path / "model").command(tmp_path, 1)


@pytest.mark.long
def test_vllm_gets_all_cores_and_its_openmp(tmp_path: Path) -> None:
    openmp = tmp_path / "venv" / "lib" / "libiomp5.so"
    openmp.parent.mkdir(parents=True)
    openmp.touch()
    environment = VllmCpu(tmp_path, tmp_path).environment()
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert str(openmp) in environment["LD_PRELOAD"].split(":")


@pytest.mark.long
def test_our_server_over_the_peers_vllm_is_asked_on_openais_path(tiny_model: Path, tmp_path: Path) -> None:
    commands, folder = tmp_path / "venv" / "bin", tmp_path / "server"
    commands.mkdir(parents=True)
    folder.mkdir()
    interpreter(commands)
    with OursVllm(tmp_path, tiny_model).start(folder) as live:
        assert set(live.endpoints) == {"rest"}
        asked = {"model": "bench", "prompt": "x", "max_tokens": 3}
        answer = plain_http.post(f"http://127.0.0.1:{live.http_port}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
    settings = json.loads((folder / "bench" / "model-settings.json").read_text())
    assert settings["parameters"]["extra"]["vllm"] == {"enable_prefix_caching": False}


def test_only_a_gguf_file_is_given_to_others_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    assert gguf_file(str(file)) == file
    with pytest.raises(NoFolder, match="is not a GGUF file"):
        gguf_file(str(tmp_path / "folder"))
