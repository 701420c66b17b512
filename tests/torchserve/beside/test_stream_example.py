"""TorchServe's example of streams from cloud storage: its script and its config.properties, unchanged, on both servers.

They come from a checkout of pytorch/serve, as the other examples. The script names its addresses itself, so port 8080
for the server and 9000 for the bucket must be free, and 8081, 8082, 7070 and 7071, which servers open by default. The
script sends the third column of a table in a tar.gz, until more than 2,000 answers have come. The handler needs
transformers 4, which only its own interpreter has.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.process import running
from benchmarks.servers import wait_until_ready
from tests import plain_http
from tests.cloud.moto import moto
from tests.torchserve.beside import servers

_CHECKOUT = Path(os.environ.get("TORCHSERVE_EXAMPLES", ""), "examples")
_LIBRARIES = Path(os.environ.get("TORCHSERVE_EXAMPLES_TRANSFORMERS_4", "")).parent
_EXAMPLE = _CHECKOUT / "cloud_storage_stream_inference"
_SCRIPT = _EXAMPLE / "stream_inference.py"
_WEIGHTS = Path(__file__).with_name("weights.py")
_ROWS, _SENT = 2_100, 2_002  # the script sends groups of 1,001 and stops above 2,000
_TIMEOUT_S = 600


def _missing() -> str:
    if not _SCRIPT.exists() or not (_LIBRARIES / "s3fs").exists():
        return "there is no checkout of pytorch/serve, or its libraries are not installed; see make test-examples"
    return servers.missing()


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(_missing()), reason=_missing())]


def _run(*command: object, **options: Any) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=_TIMEOUT_S, **options)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the handler's interpreter in ``venv``, random weights in ``made``, and the archive in ``store``.

    The handler of today reads its settings from model-config.yaml, so this file is made from the example's
    setup_config.json. The tokenizer, which the example downloads, is in the archive.
    """
    folder = tmp_path_factory.mktemp("stream")
    _run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    paths = [str(_LIBRARIES / "transformers-4"), *(path for path in sys.path if not path.startswith(sys.base_prefix))]
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / f"venv/lib/{version}/site-packages/libraries.pth").write_text("".join(f"{path}\n" for path in paths))
    python, made = folder / "venv/bin/python", folder / "made"
    _run(python, _WEIGHTS, json.dumps([[str(made), "distilbert"]]))
    settings = {**json.loads((_EXAMPLE / "setup_config.json").read_text()), "BetterTransformer": False}
    (made / "model-config.yaml").write_text(json.dumps({"handler": settings}))
    extra = [made / "config.json", _EXAMPLE / "setup_config.json", _EXAMPLE / "index_to_name.json"]
    extra += [made / name for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json")]
    (folder / "store").mkdir()
    handler = _CHECKOUT / "Huggingface_Transformers/Transformer_handler_generalized.py"
    options = ["--model-name", "BERTSeqClassification", "--version", "1.0", "--handler", handler]
    options += ["--serialized-file", made / "pytorch_model.bin", "--extra-files", ",".join(map(str, extra))]
    options += ["--config-file", made / "model-config.yaml", "--export-path", folder / "store"]
    _run(sys.executable, "-m", "model_archiver.model_packaging", *options)
    return folder


@contextmanager
def _bucket(words: list[str]) -> Iterator[None]:
    """Serves the archive that the script reads, with texts of ``words``."""
    draw = random.Random(1)
    lines = (f'"1","title","{" ".join(draw.choices(words, k=draw.randint(1, 20)))}"\n' for _ in range(_ROWS))
    table, archive = "".join(lines).encode(), BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        info = tarfile.TarInfo("amazon_review_polarity_csv/test.csv")
        info.size = len(table)
        tar.addfile(info, BytesIO(table))
    with moto(9000) as environment:
        url = f"{environment['AWS_ENDPOINT_URL']}/pytorch-data"
        plain_http.put(url, timeout=30).raise_for_status()
        public = {"x-amz-acl": "public-read"}  # the script has no credentials
        object_url = f"{url}/amazon_review_polarity_csv.tar.gz"
        httpx.put(object_url, content=archive.getvalue(), headers=public).raise_for_status()
        yield


def _ready() -> bool:
    with suppress(httpx.TransportError, ValueError):
        return bool(plain_http.get("http://127.0.0.1:8080/ping", timeout=10).json()["status"] == "Healthy")
    return False


def _answers(command: list[str], environment: Mapping[str, str], folder: Path) -> Counter[str]:
    """Returns how often the script prints each answer. The server is started with the options of the example's page."""
    options = ["--start", "--foreground", "--model-store", str(folder / "store"), "--ncs", "--disable-token-auth"]
    options += ["--models", "my_tc=BERTSeqClassification.mar", "--ts-config", str(_EXAMPLE / "config.properties")]
    log, own = folder / f"{command[-1]}.log", folder / command[-1]
    own.mkdir()
    locations = dict.fromkeys(("LOG_LOCATION", "METRICS_LOCATION", "TMPDIR"), str(own))
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **locations, **environment}
    with running([*command, *options, "--enable-model-api"], variables, log, own) as process:
        wait_until_ready(process, _ready, log)
        said = _run(sys.executable, _SCRIPT, env={**os.environ, "PYTHONPATH": str(_LIBRARIES / "s3fs")})
    return Counter(re.findall(r"Model prediction:  (.*)", said))


def test_the_example_of_streams_answers_as_on_torchserve(folder: Path) -> None:
    python = folder / "venv/bin/python"
    own = {"MLSERVER_MODEL_EXTRA": json.dumps({"ts": "package", "python": str(python)})}
    first = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}  # TorchServe's workers are `python`
    with _bucket([word for word in (folder / "made/vocab.txt").read_text().split() if word.isalpha()]):
        ours = _answers([sys.executable, "-m", "mlserver_torch_stream.cli", "torchserve"], own, folder)
        theirs = _answers([str(python), "-m", "ts.model_server"], first, folder)
    assert sum(ours.values()) == _SENT and set(ours) == {"Positive", "Negative"}
    assert ours == theirs
