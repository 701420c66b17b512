"""TorchServe's built-in handlers, named in an archive, with tiny models: run by its own package.

`make test-all` makes the libraries that they need available to these tests only.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import os
import re
import signal
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from mlserver_torch_stream.handlers.pool.handler_request import HandlerFailed, HandlerRequest, RequestPart
from mlserver_torch_stream.handlers.pool.worker_pool import WorkerPool
from tests.cloud.command import cloud, finish, joined, start, trouble
from tests.cloud.sparse import sparse_bucket
from tests.torchserve.vision import write_site
from tests.torchserve.workshop import outcome, run, running, texts
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
needs_captum = pytest.mark.skipif(importlib.util.find_spec("captum") is None, reason="captum is not installed")
needs_torchvision = pytest.mark.skipif(
    None in (importlib.util.find_spec("captum"), importlib.util.find_spec("torchvision")),
    reason="torchvision or captum is not installed",
)
_TEXT = """
import torch

class Text(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(8, 2, mode="sum")

    def forward(self, text, offsets):
        return self.embedding(text, offsets)
"""
# Says which of the three colours there is most of; six classes, as the five best are shown.
_COLOURS = """
import torch

class Colours(torch.nn.Module):
    def forward(self, images):
        means = images.mean(dim=(2, 3))
        return {shown}
"""
_SCORES = "torch.cat([10 * means, torch.full((len(images), 3), -1000.0)], dim=1)"
_MASKS = "{'out': images}"
_BOXES = """[
            {
                "boxes": torch.tensor([[0.0, 0.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0]]),
                "labels": row.argmax().repeat(2),
                "scores": torch.tensor([0.9, 0.1]),
            }
            for row in means
        ]"""


def _archive(
    folder: Path, handler: str, model_file: str | None = None, weights: str | None = None, **labels: str
) -> str:
    described = {"modelName": "m", "handler": handler, "modelFile": model_file, "serializedFile": weights}
    (folder / "MAR-INF").mkdir()
    given = {key: value for key, value in described.items() if value is not None}
    (folder / "MAR-INF/MANIFEST.json").write_text(json.dumps({"model": given}))
    (folder / "index_to_name.json").write_text(json.dumps(labels))
    return str(folder)


def _png(*colour: int) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(buffer, "PNG")
    return buffer.getvalue()


def _request(value: bytes, request_id: str = "r", **headers: str) -> HandlerRequest:
    return HandlerRequest(request_id, [RequestPart("data", "", value)], headers)


async def _answer(pool: WorkerPool, value: bytes, **headers: str) -> Any:
    (piece,) = await texts(pool.submit(_request(value, **headers)))
    return json.loads(piece)


@needs_captum
def test_text_classifier_names_its_classes_and_explains_them(tmp_path: Path) -> None:
    """A text without known words fails alone, as in TorchServe, and the next one is served."""
    vocabulary = {"good": 1, "bad": 2, "very": 3, "very good": 4, "very bad": 5}
    weights = torch.zeros(8, 2)
    weights[1], weights[4], weights[2], weights[5] = (torch.tensor(row) for row in ([5.0, 0], [5, 0], [0, 5], [0, 5]))
    torch.save({"embedding.weight": weights}, tmp_path / "model.pt")
    torch.save(vocabulary, tmp_path / "source_vocab.pt")
    (tmp_path / "model.py").write_text(_TEXT)
    uri = _archive(tmp_path, "text_classifier", "model.py", "model.pt", **{"0": "praise", "1": "blame"})

    async def scenario() -> None:
        async with running(uri, "package") as pool:
            for text, label in ((b"<b>Very good!</b>", "praise"), (b"very bad", "blame")):
                answer = await _answer(pool, text)
                assert max(answer, key=answer.get) == label and sum(answer.values()) == pytest.approx(1)
            unknown = await outcome(pool.submit(_request(b"unheard of")))
            assert isinstance(unknown, HandlerFailed) and "KeyError" in unknown.message
            explained = await _answer(pool, b"very good", explain="True")
            assert explained["words"] == ["very", "good"] and explained["importances"][0][0] > 0.9
            assert pool.supervisor.restarts == 0

    run(scenario())


@pytest.fixture
def vision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an archive, for workers that can import torchvision."""
    found = os.pathsep.join(filter(None, (write_site(tmp_path / "site"), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", found)
    (tmp_path / "archive").mkdir()
    return tmp_path / "archive"


def _eager(folder: Path, shown: str) -> None:
    (folder / "model.py").write_text(textwrap.dedent(_COLOURS).replace("{shown}", shown))


def _colour_classifier(folder: Path) -> str:
    """Writes an archive for image_classifier with a TorchScript model, which is the most common kind."""

    class Colours(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            means = images.mean(dim=(2, 3))
            return torch.cat([10 * means, torch.full_like(means, -1000.0)], dim=1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.trace(Colours(), torch.rand(2, 3, 224, 224)).save(str(folder / "model.pt"))
    names = {str(index): name for index, name in enumerate(("red", "green", "blue", "x", "y", "z"))}
    return _archive(folder, "image_classifier", None, "model.pt", **names)


@needs_torchvision
def test_image_classifier_labels_a_bucket_of_500_images_and_resumes_byte_for_byte(vision: Path, tmp_path: Path) -> None:
    """Runs ``cloud run``, killed once. One of the objects is no image, and Pillow's error contains a memory address."""
    colours = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
    labels = [list(colours)[number % 3] for number in range(500)]
    images: dict[str, bytes | int] = {f"{n:03}.png": _png(*colours[label]) for n, label in enumerate(labels)}
    images["250.png"] = b"no image"
    archive = _colour_classifier(vision)
    with sparse_bucket(images) as bucket:

        def command(out: str) -> tuple[Any, ...]:
            where = ("run", "--input", "s3://bucket", "--output", tmp_path / out, *bucket.options())
            return (
                *where,
                "--handler",
                archive,
                "--extra",
                '{"ts": "package"}',
                "--batch-rows",
                "16",
                "--max-wait",
                "30",
            )

        assert cloud(*command("whole")) == 1
        process = start(*command("out"))
        wait_until((tmp_path / "out/part-000002.jsonl").exists, seconds=300)
        process.send_signal(signal.SIGKILL)
        assert finish(process)[0] == -signal.SIGKILL
        assert cloud(*command("out")) == 1
    assert _without_addresses(joined(tmp_path / "out")) == _without_addresses(joined(tmp_path / "whole"))
    rows = [json.loads(line) for line in joined(tmp_path / "out").splitlines()]
    assert [row["key"] for row in rows] == sorted(images)
    best = [max(answer, key=answer.get) for row in rows if trouble(row) is None for answer in _predictions(row)]
    assert best == labels[:250] + labels[251:] and trouble(rows[250]) is not None


def _without_addresses(part: bytes) -> bytes:
    return re.sub(rb"object at 0x[0-9a-f]+", b"", part)


def _predictions(row: dict[str, Any]) -> list[dict[str, float]]:
    found: list[dict[str, float]] = row["response"]["body"]["predictions"]
    return found


@needs_torchvision
def test_image_classifier_answers_a_batch_of_images(vision: Path) -> None:
    uri = _colour_classifier(vision)

    async def scenario() -> None:
        async with running(uri, "package", batchSize=2, maxBatchDelay=10_000) as pool:
            jobs = [pool.submit(_request(_png(*colour), str(colour))) for colour in ((255, 0, 0), (0, 0, 255))]
            answers = [json.loads((await texts(job))[0]) for job in jobs]
            assert [max(answer, key=answer.get) for answer in answers] == ["red", "blue"]
            assert all(len(answer) == 5 for answer in answers)
            no_image, image = (
                pool.submit(_request(value, str(len(value)))) for value in (b"no image", _png(0, 255, 0))
            )
            failed, fine = await asyncio.gather(outcome(no_image), outcome(image))
            assert isinstance(failed, HandlerFailed) and "cannot identify image" in failed.message
            assert isinstance(fine, list) and '"green"' in fine[0]

    run(scenario())


@needs_torchvision
def test_image_segmenter_gives_a_class_and_its_share_for_each_pixel(vision: Path) -> None:
    _eager(vision, _MASKS)
    uri = _archive(vision, "image_segmenter", "model.py")

    async def scenario() -> None:
        async with running(uri, "package") as pool:
            pixels = torch.tensor(await _answer(pool, _png(0, 255, 0)))
            assert pixels.shape == (224, 224, 2)
            assert (pixels[..., 0] == 1).all() and (pixels[..., 1] > 0.5).all()

    run(scenario())


@needs_torchvision
def test_object_detector_gives_boxes_of_enough_score(vision: Path) -> None:
    _eager(vision, _BOXES)
    uri = _archive(vision, "object_detector", "model.py", **{"0": "red", "1": "green", "2": "blue"})

    async def scenario() -> None:
        async with running(uri, "package") as pool:
            assert await _answer(pool, _png(0, 0, 255)) == [{"blue": [0, 0, 2, 2], "score": pytest.approx(0.9)}]

    run(scenario())


@pytest.mark.parametrize("which", ["shim", "package"])
def test_base_handler_itself_runs_a_model_on_both(tmp_path: Path, which: str) -> None:
    """An envelope passes it the requests as plain lists."""
    (tmp_path / "model.py").write_text(
        "import torch\n\nclass Twice(torch.nn.Module):\n    def forward(self, x): return 2 * x"
    )
    uri = _archive(tmp_path, "base_handler", "model.py")
    manifest = json.loads((tmp_path / "MAR-INF/MANIFEST.json").read_text())
    manifest["model"]["envelope"] = "body"
    (tmp_path / "MAR-INF/MANIFEST.json").write_text(json.dumps(manifest))

    async def scenario() -> None:
        async with running(uri, which) as pool:
            (piece,) = await texts(
                pool.submit(HandlerRequest("r", [RequestPart("data", "application/json", b"[1.5, 2]")]))
            )
            assert json.loads(piece) == [3.0, 4.0]

    run(scenario())


def test_densenet_handler_takes_and_gives_tensors(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        _TEXT.replace("Text(", "Net(")
        .replace("(text, offsets)", "(rows)")
        .replace("def forward(self, text, offsets)", "def forward(self, rows)")
        .replace("self.embedding(rows)", "rows.sum(1)")
    )
    torch.save({"embedding.weight": torch.zeros(8, 2)}, tmp_path / "model.pt")
    buffer = io.BytesIO()
    torch.save(torch.tensor([1.0, 2.0]), buffer)

    async def scenario() -> None:
        async with running(_archive(tmp_path, "densenet_handler", "model.py", "model.pt"), "package") as pool:
            (piece,) = [piece async for piece in pool.submit(_request(buffer.getvalue()))]
            assert torch.load(io.BytesIO(piece.value)).tolist() == [3.0]

    run(scenario())
