"""Install size, start time and idle memory of our server and of peers, as a table.

python -m benchmarks.footprint --peers llama.cpp --mlserver-hf /path/to/env/bin/python

Each server is started ``--sweeps`` times in turn; the table has the medians. Memory is measured ``--settle`` seconds
after the server is ready and has answered one request, as PSS summed over its processes: a page that processes share
counts once. The install size counts the files of the distributions that a server needs, without Python and the model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks import load, machine
from benchmarks.answers import Ask
from benchmarks.bench import EMBEDDED
from benchmarks.http_endpoint import HOST, HttpEndpoint
from benchmarks.model_folder import gguf_file, model_folder
from benchmarks.peers import PEERS
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.peer import Peer
from benchmarks.process import family, free_ports, running
from benchmarks.prompts import Prompts
from benchmarks.servers import Contender, Live, Ours, clean_environment, wait_until_ready, write_mlserver_folder
from benchmarks.spellings import V2Spelling
from benchmarks.sweep import started

# Prints the bytes of a distribution's files and of all that it requires, in the environment that runs it.
_SIZE = """
import importlib.metadata as metadata, re, sys
from packaging.requirements import Requirement
todo, seen, total = [Requirement(name) for name in sys.argv[1:]], {}, 0
while todo:
    asked = todo.pop()
    name = re.sub(r"[-_.]+", "-", asked.name).lower()
    extras = frozenset(asked.extras)
    if seen.get(name, frozenset()) >= extras and name in seen:
        continue
    new = name not in seen
    seen[name] = seen.get(name, frozenset()) | extras
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        continue
    if new:
        for file in found.files or ():
            path = found.locate_file(file)
            total += path.stat().st_size if path.is_file() else 0
    for text in found.requires or ():
        needed = Requirement(text)
        wanted = [{"extra": extra} for extra in extras or ("",)]
        if needed.marker is None or any(needed.marker.evaluate(environment) for environment in wanted):
            todo.append(needed)
print(total)
"""


def size_of(python: Path, *distributions: str) -> int:
    """Returns the bytes of these distributions with their requirements, as installed for this interpreter."""
    done = subprocess.run([str(python), "-c", _SIZE, *distributions], capture_output=True, text=True, check=True)
    return int(done.stdout)


def pss_mib(pids: Sequence[int]) -> float:
    """Returns the proportional set size of the processes together; 0 on systems without /proc."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            total += int(found[1]) if found else 0
    return total / 1024


@dataclass(frozen=True)
class MlserverHuggingFace:
    """MLServer's own HuggingFace runtime over the same weights. It answers one request at a time, without streaming."""

    python: Path
    model: Path
    name: str = "mlserver-huggingface"
    one_at_a_time: bool = True

    def versions(self) -> dict[str, str]:
        return {}

    @contextmanager
    def start(self, folder: Path) -> Iterator[Live]:
        http_port, grpc_port, metrics_port = free_ports(3)
        ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port, "host": HOST}
        extra = {"task": "text-generation", "pretrained_model": str(self.model)}
        write_mlserver_folder(folder, "bench", "mlserver_huggingface.HuggingFaceRuntime", {"extra": extra}, ports)
        log = folder / "server.log"
        began = time.perf_counter()
        command = [str(self.python), "-m", "mlserver.cli", "start", str(folder)]
        environment = {**clean_environment(), "HF_HUB_OFFLINE": "1"}
        with running(command, environment, log, folder) as process:
            wait_until_ready(process, http_port, "/v2/models/bench/ready", log)
            endpoint = HttpEndpoint(http_port, V2Spelling("bench"))
            yield Live(process.pid, http_port, time.perf_counter() - began, {"rest": endpoint})

    def ask(self, live: Live) -> None:
        """Has one short answer generated."""
        tensor = {"name": "args", "shape": [1], "datatype": "BYTES", "data": ["The capital of France is"]}
        body = json.dumps({"inputs": [tensor], "parameters": {"content_type": "str"}})
        url = f"http://{HOST}:{live.http_port}/v2/models/bench/infer"
        subprocess.run(["curl", "-sf", url, "-d", body], check=True, capture_output=True, timeout=120)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and prints the table and its lines as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uri", default=EMBEDDED, help="the model (%(default)s)")
    parser.add_argument("--peers", default="", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "mlserver-torch-stream" / "peers")
    parser.add_argument("--mlserver-hf", type=Path, help="the interpreter of an environment with mlserver-huggingface")
    parser.add_argument("--sweeps", type=int, default=3)
    parser.add_argument("--settle", type=float, default=3.0)
    parser.add_argument("--output", type=Path, help="a file to which the lines are appended")
    options = parser.parse_args(arguments)
    folder = model_folder(options.uri, {})
    own = gguf_file(options.uri)
    here = Path(sys.executable)
    servers: list[tuple[Contender, str, int]] = [
        (Ours(options.uri), "bf16", size_of(here, "mlserver-torch-stream")),
        (replace(Ours(str(own), {"weights": "packed"}), name="mlserver-torch-stream, packed"), "Q4_1", 0),
    ]
    for name in filter(None, options.peers.split(",")):
        make, home = PEERS[name]
        for weights, kind in ((None, "bf16"), (own, "Q4_1")):
            peer: Peer = make(options.folder.resolve() / home, folder, None, weights=weights)
            if weights is None or peer.reads_gguf:
                peer.install()
                peer.prepare()
                servers.append((replace(peer, name=f"{peer.name}, {kind}"), kind, _installed(peer)))
    if options.mlserver_hf:
        size = size_of(options.mlserver_hf, "mlserver-huggingface", "torch")
        servers.append((MlserverHuggingFace(options.mlserver_hf, folder), "bf16", size))
    text, count = Prompts(folder).text(32, "footprint")
    found: dict[str, list[tuple[float, float]]] = {contender.name: [] for contender, _, _ in servers}
    for _ in range(options.sweeps):
        for contender, _, _ in servers:
            with started(contender) as live:
                if isinstance(contender, MlserverHuggingFace):
                    contender.ask(live)
                else:
                    asyncio.run(_ask(live, Ask(text, count, 8)))
                time.sleep(options.settle)
                found[contender.name].append((live.ready_s, pss_mib(family(live.pid))))
                print(contender.name, found[contender.name][-1], file=sys.stderr, flush=True)
    described = machine.describe()
    print("| server | weights | installed, MB | start, s | idle memory, MiB |\n|---|---|---|---|---|")
    for contender, kind, size in servers:
        ready, memory = (median(values) for values in zip(*found[contender.name], strict=True))
        installed = f"{size / 1e6:,.0f}" if size else "the same"
        print(f"| {contender.name} | {kind} | {installed} | {ready:.1f} | {memory:,.0f} |")
        if options.output:
            line = {"date": described["date"], "chip": machine.chip(), "server": contender.name, "weights": kind,
                    "installed_bytes": size, "starts_s_and_pss_mib": found[contender.name]}  # fmt: skip
            with options.output.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return 0


async def _ask(live: Live, ask: Ask) -> None:
    endpoint = live.endpoints["rest"]
    try:
        for recording in await load.together(endpoint, [ask]):
            endpoint.read(recording)
    finally:
        await endpoint.close()


def _installed(peer: Peer) -> int:
    """Returns the size of a peer: its program, or its distributions with their requirements."""
    if isinstance(peer, LlamaCpp):
        return (peer.home / "build" / "bin" / "llama-server").stat().st_size
    return size_of(peer.python, *peer.distributions)


if __name__ == "__main__":
    sys.exit(main())
