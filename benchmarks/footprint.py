"""Install sizes of our server and of peers, as a table. ``make bench-peers`` measures start times and memory.

python -m benchmarks.footprint --peers vllm,llama.cpp --mlserver-hf /path/to/env/bin/python

The size counts the files of the distributions that a server needs, without Python and the model.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.model_folder import model_folder
from benchmarks.peers import FOLDER, PEERS, installed
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.servers import EMBEDDED, OURS

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Installs the peers that are not installed yet, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="their environments (%(default)s)")
    parser.add_argument("--mlserver-hf", type=Path, help="the interpreter of an environment with mlserver-huggingface")
    options = parser.parse_args(arguments)
    sizes = {OURS: size_of(Path(sys.executable), OURS)}
    for peer in installed(options.peers, options.folder, model_folder(EMBEDDED, {})):
        program = peer.home / "build" / "bin" / "llama-server"
        is_program = isinstance(peer, LlamaCpp)
        sizes[peer.name] = program.stat().st_size if is_program else size_of(peer.python, *peer.distributions)
    if options.mlserver_hf:
        sizes["mlserver-huggingface"] = size_of(options.mlserver_hf, "mlserver-huggingface", "torch")
    print("| server | installed, MB |\n|---|---|")
    for name, size in sizes.items():
        print(f"| {name} | {size / 1e6:,.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
