"""``make bench-peers``: runs the same load on other servers, in turn within one run, and prints the ratios.

``--format q8_0`` gives all servers that can read it the same GGUF file. ``--shape 1.5B`` measures models of that size
with random weights instead of the embedded one. Shapes and formats are lists: each pair is a run, which has a cell for
each server and case. A command that was stopped continues with the cells that have no line yet.

``--peers torchserve`` runs a handler, unchanged, on TorchServe 0.12 and on our server, both with the same archive and
config.properties. The handler generates with transformers, with ``batchSize`` 1 and 16, streamed and whole, or answers
at once (``requests``), which needs Debian's ``wrk``. Both servers run, and take turns in each case.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import bench, report
from benchmarks.cases import make_cases
from benchmarks.model_folder import NoFolder, gguf_file, model_folder
from benchmarks.peers import FOLDER, PEERS, make_peer
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.peer import Peer, PeerUnavailable
from benchmarks.peers.torchserve.peer import HANDLED, HandlerServer, OurTorchServe, TorchServe
from benchmarks.prompts import Prompts
from benchmarks.servers import Contender, Ours, StartFailed
from benchmarks.shapes import BITS, SHAPES, written
from benchmarks.sweep import Plan, run_beside

_BF16, _OWN = "bf16", "own"
_FORMATS = (*BITS, _OWN)
_STREAMS = (1, 4, 16, 32)
_SHAPE_STREAMS = (1, 4, 16)
_SHAPE_WAVE_STREAMS = 2
_PROMPTS = ("p128", "p2000")
_SPARE_MIB = 1024.0  # that a server needs in addition to its weights
_TORCHSERVE = "torchserve"
_HANDLER_CASES = ("c1", "c4", "c16", "r1", "r20000")
_HANDLER_PROMPT, _HANDLER_ANSWER = 32, 16  # tokens


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    home = model_folder(options.uri, json.loads(options.extra))
    measure = _measure_handlers if options.peers == (_TORCHSERVE,) else _measure
    results = []
    for shape in options.shape or (None,):
        place: AbstractContextManager[Path] = nullcontext(home)
        if shape is not None and not options.install_only:
            place = written(shape, options.folder.resolve(), home)
        with place as folder:
            results += [measure(shape, kind, options, folder) for kind in options.format]
    if options.install_only:
        return 1 if any(result["not_installed"] for result in results) else 0
    for result in results:
        print(report.as_markdown(result), end="\n\n")
    if len(results) > 1:
        print(report.markdown(report.comparison(results)))
    return 1 if any(result["servers"][0]["failures"] for result in results) else 0


def _measure(shape: str | None, kind: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs one shape of model in one format."""
    weights = None if kind == _BF16 or options.install_only else _weights_file(kind, options, folder)
    extra = {**json.loads(options.extra), **({} if weights is None else {"weights": "packed"})}
    uri = str(weights or folder) if shape or weights else options.uri
    contenders: dict[str, Contender] = {} if options.install_only else {Ours.name: Ours(uri, extra)}
    peers, missing = _install(options, kind, folder, weights)
    if options.install_only:
        return {"not_installed": missing}
    contenders |= {peer.name: peer for peer in peers}
    prompts = Prompts(folder)
    cases = make_cases(options.cases, options.scale, prompts)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    needed = SHAPES[shape].parameters(vocabulary) * BITS[kind] / 8 / 2**20 + _SPARE_MIB if shape else 0.0
    made = None if shape is None else partial(_made_of, folder.name, options.folder.resolve())
    plan = Plan(
        *(cases, options.scale, prompts, options.sweeps), lenient=True, least_mib=needed, weights=made,
        alone_sweeps=options.alone_sweeps, say=bench.say,
    )  # fmt: skip
    model = f"random weights of {shape}" if shape else options.uri
    more = {"extra": extra, "not_installed": missing, **({"shape": shape} if shape else {})}
    if not options.quick:
        more |= bench.roofline(folder, weights)
    head = {**more, "model": model if weights is None else f"{model} as {weights.name}"}
    return bench.measure(options, f"peers-{kind}", plan, contenders, head)


def _made_of(model: str, folder: Path) -> list[Path]:
    """Returns the files and folders of a model, and all that servers have made from it so far."""
    ours = FOLDER.parent
    return [*folder.glob(f"*/{model}*"), *ours.glob(f"{model}*"), ours / "panels"]


def _measure_handlers(shape: str | None, kind: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs one of ``HANDLED`` on TorchServe and on our server. Raises PeerUnavailable."""
    peer = TorchServe(options.folder.resolve() / _TORCHSERVE, folder)
    peer.install()
    if options.install_only:
        return {"not_installed": {}}
    if HANDLED[kind] is None and shutil.which("wrk") is None:
        raise PeerUnavailable("wrk is not installed")
    prompts = Prompts(folder)
    cases = make_cases(_of_handler(kind, options.cases), options.scale, prompts)
    plan = Plan(cases, options.scale, prompts, options.sweeps, lenient=True, say=bench.say)
    servers = [HandlerServer(server, kind, folder) for server in (OurTorchServe(), peer)]
    contenders: dict[str, Contender] = {server.name: server for server in servers}
    return bench.measure(options, f"peers-{kind}", plan, contenders, {"not_installed": {}}, run_beside)


def _of_handler(kind: str, cases: Sequence[str]) -> list[str]:
    """Returns the cases that the handler of one of ``HANDLED`` can answer."""
    return [case for case in cases if case.startswith("r") == (HANDLED[kind] is None)]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    bench.add_common(parser)
    parser.add_argument("--peers", help=f"some of {', '.join(PEERS)} (default: all), or only {_TORCHSERVE}")
    parser.add_argument("--shape", help=f"some of {', '.join(SHAPES)}: models with random weights, instead of --uri")
    handled = f"with --peers {_TORCHSERVE} some of {', '.join(HANDLED)} (all)"
    parser.add_argument("--format", help=f"some of {', '.join(_FORMATS)} ({_BF16}); own: the file of --uri; {handled}")
    parser.add_argument("--streams", help="at once (1,4,16,32; with --shape 1,4,16); p128 and p2000 run too")
    parser.add_argument("--alone-sweeps", type=int, default=0, help="further rounds with one stream only (%(default)s)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the peers' environments (%(default)s)")
    parser.add_argument("--install-only", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    if options.peers == _TORCHSERVE:
        _finish_handlers(parser, options)
        return options
    options.format = options.format or _BF16
    streams = options.streams.split(",") if options.streams else _SHAPE_STREAMS if options.shape else _STREAMS
    cases = (*(f"c{count}" for count in streams), *_PROMPTS)
    options.cases = options.cases or (",".join(cases) if options.streams else None)
    bench.finish(parser, options, cases)
    options.most_streams = max(map(int, streams))
    options.shape = bench.listed(parser, "shape", options.shape, tuple(SHAPES)) if options.shape else ()
    if options.shape:
        options.scale = replace(options.scale, wave_streams=min(_SHAPE_WAVE_STREAMS, options.scale.wave_streams))
    options.format = bench.listed(parser, "format", options.format, _FORMATS)
    if options.shape and _OWN in options.format:
        parser.error("--format own: cannot be combined with --shape, because it means the file of --uri")
    able = [name for name, (peer, _) in PEERS.items() if peer.reads_gguf or _BF16 in options.format]
    options.peers = bench.listed(parser, "peers", options.peers or ",".join(able), tuple(PEERS))
    for name in options.peers:
        if name not in able:
            parser.error(f"--peers: {name!r} reads no GGUF files; those that do are {', '.join(able)}")
    return options


def _finish_handlers(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.shape:
        parser.error(f"--shape: cannot be combined with --peers {_TORCHSERVE}")
    streams = tuple(f"c{count}" for count in options.streams.split(",")) if options.streams else ()
    options.cases = options.cases or ",".join(streams or _HANDLER_CASES)
    bench.finish(parser, options, ())
    tokens = options.new_tokens or min(options.scale.new_tokens, _HANDLER_ANSWER)
    options.scale = replace(options.scale, prompt_tokens=_HANDLER_PROMPT, new_tokens=tokens)
    kinds = bench.listed(parser, "format", options.format or ",".join(HANDLED), tuple(HANDLED))
    options.format = tuple(kind for kind in kinds if _of_handler(kind, options.cases))
    options.peers, options.shape = (_TORCHSERVE,), ()


def _weights_file(kind: str, options: argparse.Namespace, model: Path) -> Path:
    """Returns the GGUF file that all servers get. Raises NoFolder or PeerUnavailable if it cannot be had."""
    if kind == _OWN:
        return gguf_file(options.uri)
    converter = make_peer("llama.cpp", options.folder, model)
    assert isinstance(converter, LlamaCpp)
    converter.install()
    return converter.convert(kind)


def _install(
    options: argparse.Namespace, kind: str, model: Path, weights: Path | None
) -> tuple[list[Peer], dict[str, str]]:
    """Returns the peers that are installed, and for each of the others the reason why it is not."""
    peers, missing = [], {}
    for name in options.peers:
        peer = replace(make_peer(name, options.folder, model, weights), streams=options.most_streams)
        if kind != _BF16 and not peer.reads_gguf:
            missing[name] = f"reads no GGUF files, so it cannot serve {kind}"
            continue
        try:
            bench.say(f"{name}: installing it, unless it is installed already")
            peer.install()
            if not options.install_only:
                peer.prepare()
            peers.append(peer)
        except PeerUnavailable as error:
            missing[name] = str(error)
            bench.say(f"{name}: not installed: {error}")
    return peers, missing


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (NoFolder, PeerUnavailable, StartFailed) as error:
        sys.exit(f"error: {error}")
