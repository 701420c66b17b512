"""Builds the Dockerfile beside this file with buildah, starts the image of its target for CPUs, and asks for a stream.

As root: ``python -m deploy.image.prove --work FOLDER``. The base is a fresh Debian, in which pip has this machine's
settings (images.py). The image is then started twice, with only a loopback network and a file system on which
only its volumes are writable: once with its own entry point and user, and once with the command of KServe's manifest,
as a user that has no name and no HOME.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from deploy.image.dockerfile import read_dockerfile
from deploy.image.host_pip import read_host_pip
from deploy.image.images import Builder, Image, StepFailed
from mlserver_torch_stream.engine.loading.embedded import EMBEDDED, find_embedded

CONTEXT = Path(__file__).parents[2]
DOCKERFILE = Path(__file__).parent / "Dockerfile"
TARGET = "cpu"
TOOLS = ("buildah", "debootstrap", "chroot", "ip", "mount", "nsenter", "setpriv", "unshare")
_MANIFEST = CONTEXT / "deploy/kserve/cluster-serving-runtime.yaml"
_READY_S = 600.0
_END_S = 120.0
_MODELS = "/mnt/models"
_COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "zig", "ld", "as", "nvcc")
_ASK = """
import sys
from mlserver_torch_stream.client import stream
events = list(stream("http://127.0.0.1:8080", sys.argv[1], "The capital of France is", max_tokens=200, ignore_eos=True))
assert len(events) > 1, f"{len(events)} event"
print(f"{len(events)} events, {events[-1].num_output_tokens} tokens: {''.join(map(str, events))[:60]!r} …")
"""
_WRITE = """
import sys
for folder in sys.argv[1:]:
    try:
        open(f"{folder}/written", "w")
    except OSError:
        continue
    sys.exit(f"{folder} is writable, and must not be")
"""


@dataclass(frozen=True)
class Start:
    """One way to start the image. ``writable`` maps the writable folders to their modes."""

    said: str
    command: Sequence[str]
    environment: Mapping[str, str]
    user: str
    writable: Mapping[str, int]
    model: str


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        sys.exit(f"error: this needs root and {', '.join(missing or TOOLS)}")
    work = Path(arguments.work).resolve()
    given = dict(word.split("=", 1) for word in arguments.build_arg)
    base = given.get("BASE", read_dockerfile(DOCKERFILE).arguments["BASE"])
    try:
        image = Builder(work, read_host_pip()).build(DOCKERFILE, CONTEXT, TARGET, base, given)
        _check_no_compiler(image.root)
        model = _readable(arguments.model or find_embedded(next(iter(EMBEDDED))), work / "model")
        for start in (_by_entry_point(image), _by_manifest(image)):
            _prove(image, start, model, work)
    except StepFailed as error:
        sys.exit(f"error: {error}")
    print("The image streams.")
    return 0


def _readable(model: Path, folder: Path) -> Path:
    """Returns a folder with copies of the model's files, which every user can read."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in model.iterdir() if model.is_dir() else (model,):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    return folder


def _check_no_compiler(root: Path) -> None:
    found = [path for name in _COMPILERS for path in root.rglob(name) if os.access(path, os.X_OK) and path.is_file()]
    if found:
        raise StepFailed(f"the image has a compiler: {', '.join(map(str, found))}")


def _by_entry_point(image: Image) -> Start:
    modes = {volume: (image.root / volume.lstrip("/")).stat().st_mode & 0o7777 for volume in image.volumes}
    command = [*image.entrypoint, *image.command]
    return Start("entry point", command, image.environment, image.user, modes, Path(_MODELS).name)


def _by_manifest(image: Image) -> Start:
    """Returns the start that Kubernetes makes: the manifest's command, its variables over the image's, empty mounts."""
    (container,) = yaml.safe_load(_MANIFEST.read_text(encoding="utf-8"))["spec"]["containers"]
    own = {each["name"]: each["value"].replace("{{.Name}}", "proved") for each in container["env"]}
    environment = {**image.environment, **own, "MLSERVER_HTTP_PORT": "8080"}
    del environment["HOME"], environment["USER"]
    mounts = {mount["mountPath"]: 0o777 for mount in container["volumeMounts"]}
    return Start("KServe's manifest", container["command"], environment, "1000660000:0", mounts, "proved")


def _prove(image: Image, start: Start, model: Path, work: Path) -> None:
    print(f"{start.said}: {shlex.join(start.command)} as {start.user}")
    log = work / f"{start.model}.log"
    with _started(image, start, model, log) as process:
        inside = _entering(process, start)
        end = time.monotonic() + _READY_S
        while _is_outside(process) or subprocess.run([*inside, *image.health], timeout=60).returncode:
            if process.poll() is not None or time.monotonic() > end:
                raise StepFailed(f"the server of the image did not become ready:\n{log.read_text()}")
            time.sleep(0.5)
        for script, words in ((_WRITE, ["/", "/opt", "/opt/venv", _MODELS]), (_ASK, [start.model])):
            if subprocess.run([*inside, "python", "-c", script, *words], timeout=300).returncode:
                raise StepFailed(f"this script failed in the image:{script}\nThe server's log:\n{log.read_text()}")
    if process.returncode:
        raise StepFailed(f"the server of the image ended with status {process.returncode}:\n{log.read_text()}")
    print(*(line for line in log.read_text().splitlines() if "our own kernels" in line), sep="\n")


@contextmanager
def _started(image: Image, start: Start, model: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    root = shlex.quote(str(image.root))
    script = [f"mount --bind {root} {root}", f"mount -o remount,bind,ro {root}", "ip link set lo up"]
    script += [f"mount -t tmpfs -o mode={mode:o} tmpfs {root}{place}" for place, mode in start.writable.items()]
    folder = shlex.quote(str(model))
    script += [f"mount --bind {folder} {root}{_MODELS}", f"mount -o remount,bind,ro {root}{_MODELS}"]
    script += [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev", 'exec "$@"']
    variables = [f"{name}={value}" for name, value in start.environment.items()]
    command = ["setpriv", "--no-new-privs", "chroot", f"--userspec={start.user}", "--groups=", str(image.root)]
    command += ["env", "-i", f"--chdir={image.folder}", *variables, *start.command]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            ["unshare", "--mount", "--net", "sh", "-ec", "\n".join(script), "sh", *command], stdout=sink, stderr=sink
        )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        process.wait(_END_S)
    finally:
        process.kill()
        process.wait()


def _is_outside(process: subprocess.Popen[bytes]) -> bool:
    """Returns whether the process has not yet changed its root, or has ended."""
    try:
        return os.readlink(f"/proc/{process.pid}/root") == "/"
    except OSError:
        return True


def _entering(process: subprocess.Popen[bytes], start: Start) -> list[str]:
    """Returns the words that run a command next to the server, as ``docker exec`` and the health check do."""
    uid, gid = start.user.split(":")
    namespaces = ["nsenter", f"--target={process.pid}", "--mount", "--net", "--root", "--wd=/"]
    variables = [f"{name}={value}" for name, value in start.environment.items()]
    return [*namespaces, f"--setuid={uid}", f"--setgid={gid}", "env", "-i", *variables]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.image.prove", description=__doc__)
    parser.add_argument(
        "--work", required=True, help="a folder for some gigabytes of images; the next run reuses its Debian"
    )
    parser.add_argument("--model", type=Path, help="a folder with a model, or a .gguf file; default: the embedded one")
    parser.add_argument(
        "--build-arg", action="append", default=[], metavar="NAME=VALUE", help="a build argument of the Dockerfile"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
