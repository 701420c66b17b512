"""Reads the settings of this machine's pip, for a pip in another root file system. Knows nothing of images."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_KEYS = ("cert", "default-timeout", "extra-index-url", "find-links", "index-url", "timeout", "trusted-host")
_CERTIFICATE = "/run/pip-certificate.pem"  # not the path of the system's own certificates, which a step may write
_SECTIONS = (":env:", "install", "global")  # the first that has a key counts


@dataclass(frozen=True)
class HostPip:
    """The settings, and the files of this machine that they name.

    ``binds`` maps paths in the other file system to the files and folders of this machine to be mounted there.
    """

    settings: dict[str, str]  # by pip's names
    binds: dict[str, Path]

    def write(self, folder: Path) -> Path:
        """Writes the settings as a configuration file of pip into a folder, and returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{key} = {value}" for key, value in self.settings.items()]
        (folder / "pip.conf").write_text("\n".join(["[global]", *lines, ""]), encoding="utf-8")
        return folder


def read_host_pip() -> HostPip:
    found: dict[tuple[str, str], str] = {}
    pip = [sys.executable, "-m", "pip", "config", "list"]
    for line in subprocess.run(pip, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        found[section, key] = " ".join(str(ast.literal_eval(value)).split())
    values = {key: found[section, key] for section in reversed(_SECTIONS) for key in _KEYS if (section, key) in found}
    binds: dict[str, Path] = {}
    if "cert" in values:
        binds[_CERTIFICATE] = Path(values["cert"])
        values["cert"] = _CERTIFICATE
    for word in " ".join(values.get(key, "") for key in ("extra-index-url", "find-links", "index-url")).split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute():
            place = path.parent if word.startswith("file://") else path  # an index's pages lead to files beside it
            binds[str(place)] = place
    return HostPip(values, binds)
