"""``make bench-peers``: the same load on other servers, in turn in one run, and the ratios.

``--weights Q4_1`` or ``Q8_0`` gives all servers that can read it the same GGUF file. Knows the servers by name only;
each is installed on demand into an environment outside the project.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import bench, machine, report  # noqa: E402
from benchmarks.cases import make_cases  # noqa: E402
from benchmarks.model_folder import NoFolder, gguf_file, model_folder  # noqa: E402
from benchmarks.peers import PEERS  # noqa: E402
from benchmarks.peers.llama_cpp import LlamaCpp  # noqa: E402
from benchmarks.peers.peer import Peer, PeerUnavailable  # noqa: E402
from benchmarks.prompts import Prompts  # noqa: E402
from benchmarks.servers import Contender, Ours  # noqa: E402
from benchmarks.sweep import Plan, run_sweeps  # noqa: E402

_BF16 = "bf16"
_WEIGHTS = (_BF16, "Q4_1", "Q8_0")
_CASES = ("c1", "c4", "c16", "c32", "p2000", "c32+p2000", "mix")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    ours = Ours(options.uri, json.loads(options.extra))
    folder = model_folder(ours.uri, ours.extra)
    weights = None if options.weights == _BF16 else _weights_file(options, folder)
    if weights is not None:
        ours = Ours(str(weights), {**ours.extra, "weights": "packed"})
    peers, missing = _install(options, folder, weights)
    if options.install_only:
        return 1 if missing else 0
    prompts = Prompts(folder, options.seed)
    result: dict[str, Any] = {
        "machine": machine.describe(),
        "model": options.uri if weights is None else f"{options.uri} as {weights.name}",
        "extra": ours.extra,
        "sweeps": options.sweeps,
        "scale": asdict(options.scale),
        "not_installed": missing,
        **bench.limits(folder, weights),
    }
    if (busy := machine.warning(result["machine"])) is not None:
        print(f"warning: {busy}", file=sys.stderr)
    cases = make_cases(options.cases, options.scale, prompts)
    contenders: list[Contender] = [ours, *peers]
    plan = Plan(cases, options.scale, prompts, options.sweeps, lenient=True, say=bench.say)
    result["servers"] = [measured.as_json() for measured in run_sweeps(contenders, plan)]
    print(report.as_text(result))
    name = "peers" if weights is None else f"peers_{options.weights.lower()}"
    bench.keep(result, options.output, name, f"Our server beside others, {options.weights}")
    return 1 if result["servers"][0]["failures"] else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    bench.add_common(parser)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--peers", help=f"of {', '.join(PEERS)}; default: all")
    parser.add_argument(
        "--weights",
        choices=_WEIGHTS,
        default=_BF16,
        help="Q4_1: the model's own GGUF file; Q8_0: one that llama.cpp's converter makes (default: %(default)s)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=cache / "mlserver-torch-stream" / "peers",
        help="their environments (%(default)s)",
    )
    parser.add_argument("--torch-index", default=os.environ.get("TORCH_INDEX") or None, help="where torch comes from")
    parser.add_argument("--install-only", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    bench.finish(parser, options, _CASES)
    able = [name for name, (peer, _) in PEERS.items() if peer.reads_gguf or options.weights == _BF16]
    options.peers = tuple((options.peers or ",".join(able)).split(","))
    for name in options.peers:
        if name not in able:
            what = f"peer {name!r} that reads {options.weights}" if name in PEERS else f"peer {name!r}"
            parser.error(f"no {what}; known are {', '.join(able)}")
    return options


def _weights_file(options: argparse.Namespace, model: Path) -> Path:
    """The GGUF file that all servers get. Raises NoFolder or PeerUnavailable."""
    if options.weights == "Q8_0":
        converter = _peer("llama.cpp", options, model)
        converter.install()
        assert isinstance(converter, LlamaCpp)
        return converter.convert("q8_0")
    own = gguf_file(options.uri)
    if options.weights not in own.name:
        raise NoFolder(f"{own.name} is not in {options.weights}")
    return own


def _peer(name: str, options: argparse.Namespace, model: Path, weights: Path | None = None) -> Peer:
    make, folder = PEERS[name]
    return make(options.folder.resolve() / folder, model, options.torch_index, weights=weights)


def _install(options: argparse.Namespace, model: Path, weights: Path | None) -> tuple[list[Peer], dict[str, str]]:
    """Those that are there, and of the others why they are not."""
    peers, missing = [], {}
    for name in options.peers:
        peer = _peer(name, options, model, weights)
        try:
            bench.say(f"{name}: installing where it is not there yet")
            peer.install()
            peer.prepare()
            peers.append(peer)
        except PeerUnavailable as error:
            missing[name] = str(error)
            bench.say(f"{name}: not installed: {error}")
    return peers, missing


if __name__ == "__main__":
    sys.exit(main())
