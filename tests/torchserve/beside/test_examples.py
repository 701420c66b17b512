"""TorchServe's own example handlers, unchanged, on both servers: the page of examples says what was measured.

They come from a checkout of pytorch/serve, whose folder the variable TORCHSERVE_EXAMPLES names; none of it is part of
this project. ``make test-examples`` installs what they import.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.torchserve.beside import page, servers
from tests.torchserve.beside.examples import GROUPS, Example
from tests.torchserve.beside.left_out import LEFT_OUT
from tests.torchserve.beside.packing import pack
from tests.torchserve.beside.replies import ask
from tests.torchserve.beside.reply import Reply
from tests.torchserve.beside.store import Stored
from tests.torchserve.vision import write_site

_CHECKOUT = os.environ.get("TORCHSERVE_EXAMPLES", "")
_TRANSFORMERS_4 = os.environ.get("TORCHSERVE_EXAMPLES_TRANSFORMERS_4", "")
_NEEDED = ("captum", "lru", "model_archiver", "torchvision", "xgboost")
_TIMEOUT_S = 300
_LEAST = 15
_LONGEST = 120  # characters of an answer in the table
_HANDLER = re.compile(r"(.*handler[^/]*)\.py")
PAGE = "docs/torchserve/examples.md"
_HEAD = """\
# TorchServe's examples, here

Unchanged handlers of [pytorch/serve](https://github.com/pytorch/serve/tree/master/examples) are packed by
`torch-model-archiver`, loaded by TorchServe 0.12 and by our server, and called with the curl lines of their pages. The
weights are random, with the right shapes. The settings are those of the examples, except that there is one worker, on
the CPU, and that the models are not compiled. A test writes this page (`make test-examples`, with a checkout of
pytorch/serve and a Java runtime), and fails if the status, the headers or a byte of an answer differs between the two.

The test uses Python 3.11, torch 2.13, torchvision 0.28 and the package torchserve, whose `BaseHandler` and built-in
handlers most examples use. `Huggingface_Transformers` and the Llama use transformers 4.44.

`cloud_storage_stream_inference` has a script of its own, which reads a tar.gz of a bucket and sends 2,002 requests. A
second test runs this script, the handler and the example's `config.properties`, unchanged, on both servers: 10 workers
with `batchSize` 2000, in an interpreter with transformers 4.44. Both give the same answers. The handler of today reads
its settings from `model-config.yaml`, which the example's page does not mention; the test writes it from the example's
`setup_config.json`.
"""


def _missing() -> str:
    if not _CHECKOUT:
        return "TORCHSERVE_EXAMPLES names no checkout of pytorch/serve"
    lacking = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if lacking or not _TRANSFORMERS_4:
        return f"not installed: {', '.join([*lacking, 'transformers 4'][: len(lacking) or 1])}; see make test-examples"
    return servers.missing()


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(_missing()), reason=_missing())]
_Both = tuple[list[Reply], list[Reply]]
Answers = Mapping[str, _Both]


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Answers]:
    """A function that returns both servers' answers to one group of examples, by their names."""
    root = tmp_path_factory.mktemp("examples")
    site = write_site(root / "site")

    @cache
    def of(group: str) -> Answers:
        first = [site, _TRANSFORMERS_4] if group == "transformers 4" else [site]
        path = os.pathsep.join([*first, os.environ.get("PYTHONPATH", "")])
        return dict(_of_group(list(GROUPS[group]), root / group.replace(" ", "-"), path))

    return of


def _of_group(examples: list[Example], folder: Path, path: str) -> Iterator[tuple[str, _Both]]:
    checkout = Path(_CHECKOUT).resolve()
    metrics = {"metrics_config": str(checkout / "examples/custom_metrics/metrics.yaml")}
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_HOME": str(folder / "hub")}
    pack(examples, checkout, folder, {**os.environ, **environment})
    models = [Stored(each.name, "") for each in examples]
    with servers.torchserve(folder, models, metrics, environment) as addresses:
        theirs = [ask(_lines(each, folder), False, addresses, checkout, _TIMEOUT_S) for each in examples]
    with servers.ours(folder, models, "package", environment) as addresses:
        ours = [ask(_lines(each, folder), False, addresses, checkout, _TIMEOUT_S) for each in examples]
    yield from ((each.name, both) for each, both in zip(examples, zip(theirs, ours, strict=True), strict=True))


def _lines(example: Example, folder: Path) -> list[str]:
    return [re.sub(r"(?<=[ @])made/", f"{folder}/{example.name}/made/", line) for line in example.lines]


@pytest.mark.parametrize(
    ("group", "example"),
    [pytest.param(name, each, id=each.name) for name, group in GROUPS.items() for each in group],
)
def test_an_example_answers_as_on_torchserve(group: str, example: Example, measure: Callable[[str], Answers]) -> None:
    theirs, ours = measure(group)[example.name]
    assert {reply.status for reply in theirs} == {200}
    assert [mine.pieces for mine in ours] == [other.pieces for other in theirs]
    assert [mine.differs(other) for mine, other in zip(ours, theirs, strict=True)] == [[]] * len(theirs)


def test_each_handler_of_the_examples_is_run_or_has_a_reason() -> None:
    examples = Path(_CHECKOUT) / "examples"
    there = {str(path.relative_to(examples)) for path in examples.rglob("*.py") if _HANDLER.fullmatch(path.name)}
    run = {each.handler.removeprefix("examples/") for group in GROUPS.values() for each in group if "/" in each.handler}
    left_out = {name for name in LEFT_OUT if name.endswith(".py")}
    assert run | left_out == there and not run & left_out
    assert all((examples / name).exists() for name in LEFT_OUT)


def test_the_page_is_what_was_measured(measure: Callable[[str], Answers]) -> None:
    rows = [_row(each, *measure(name)[each.name]) for name, group in GROUPS.items() for each in group]
    assert len(rows) >= _LEAST
    page.hold(PAGE, _page(rows))


def _page(rows: Sequence[Sequence[str]]) -> str:
    ran = page.table(("example", "requests", "answers, the same on both servers"), rows)
    rest = page.table(("handler or example", "why not"), ((f"`{name}`", why) for name, why in LEFT_OUT.items()))
    return "\n".join([_HEAD, *ran, "", "## Not run", "", *rest, ""])


def _row(example: Example, _: Sequence[Reply], ours: Sequence[Reply]) -> list[str]:
    bodies = [_rounded(page.text_of(b"".join(reply.pieces))) for reply in ours]
    shown = [f"{reply.status}, {page.code(body)}" for reply, body in zip(ours, bodies, strict=True)]
    return [example.folder, "<br>".join(page.code(line) for line in example.lines), "<br>".join(shown)]


def _rounded(text: str) -> str:
    """Rounds numbers to three digits, as the others depend on the CPU."""
    rounded = re.sub(r"-?\d+\.\d+(?:e-?\d+)?", lambda number: f"{float(number[0]):.3g}", text)
    return rounded if len(rounded) <= _LONGEST else f"{rounded[:_LONGEST]} …"
