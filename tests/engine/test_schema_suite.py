"""The public test suite of JSON Schema (draft 2020-12): accepted schemas give only valid answers, others are refused.

The suite comes from PyPI, as a part of the sources of ``jsonschema``. No model is needed: tokens are drawn at random.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.constraints import response_format
from mlserver_torch_stream.types import ModelInfo
from tests import markdown
from tests.engine.random_answers import random_answer
from tests.engine.tiny import EOS, byte_tokenizer

_SOURCES = "jsonschema==4.26.0"
_SUITE = "json/tests/draft2020-12/"
_ANSWERS = 20  # of each schema
_INFO = ModelInfo(vocab_size=259, max_model_len=64, max_num_seqs=4)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The suite's schemas, by the keyword or format that they test."""
    folder = tmp_path_factory.mktemp("suite")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command = [*pip, "--no-binary", "jsonschema", "--dest", str(folder), _SOURCES]
    subprocess.run(command, check=True, timeout=300)
    (archive,) = folder.glob("*.tar.gz")
    found = {}
    with tarfile.open(archive) as packed:
        for member in packed.getmembers():
            _, _, name = member.name.partition(_SUITE)
            of_format = name.startswith("optional/format/")
            if name.endswith(".json") and ("/" not in name or of_format):
                content = packed.extractfile(member)
                assert content is not None
                key = Path(name).stem if not of_format else f"format: {Path(name).stem}"
                found[key] = [case["schema"] for case in json.load(content)]
    return found


@pytest.fixture(scope="module")
def outcomes(suite: dict[str, list[dict[str, Any]]]) -> dict[str, tuple[int, int, set[str]]]:
    """For each keyword, the numbers of accepted and refused schemas and the reasons.

    Fails if an answer is not valid.
    """
    codec = TextCodec(byte_tokenizer())
    found = {}
    for keyword, schemas in suite.items():
        taken, refused, reasons, wrong = 0, 0, set[str](), list[Any]()
        for schema in schemas:
            if not isinstance(schema, dict):
                continue  # true or false, which no request can say
            try:
                wrong += [(schema, text) for text in _answers(codec, schema) if not _is_valid(schema, text)]
                taken += 1
            except InvalidInput as error:
                refused += 1
                reasons.add(error.reason)
        assert not wrong, wrong
        found[keyword] = (taken, refused, reasons)
    return found


def _answers(codec: TextCodec, schema: dict[str, Any]) -> Iterator[str]:
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    constraint = response_format(asked, _INFO)
    assert constraint is not None
    compiled = codec.submit(constraint).result()
    for seed in range(_ANSWERS):
        tokens = random_answer(compiled, EOS, seed)
        if tokens is not None:
            yield codec.decode(tokens, True)


def _is_valid(schema: dict[str, Any], text: str) -> bool:
    """Parses numbers as decimals, so that multiples of 0.0001 are exact."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    return bool(jsonschema.Draft202012Validator(exact).is_valid(json.loads(text, parse_float=Decimal)))


def test_the_page_says_what_is_taken_and_what_is_refused(outcomes: dict[str, tuple[int, int, set[str]]]) -> None:
    said = {name: (int(taken), int(refused)) for name, taken, refused, *_ in
            markdown.table("docs/structured-output.md", "Keywords of JSON Schema")}  # fmt: skip
    counted = {name: (taken, refused) for name, (taken, refused, _) in outcomes.items() if taken or refused}
    assert said == {f"`{name}`": counts for name, counts in counted.items()}


def test_a_keyword_that_is_refused_throughout_is_named(outcomes: dict[str, tuple[int, int, set[str]]]) -> None:
    unnamed = defaultdict(set)
    for name, (taken, _, reasons) in outcomes.items():
        keyword = name.removeprefix("format: ")
        if taken == 0 and keyword not in _GROUPS:
            unnamed[name] = {reason for reason in reasons if keyword not in reason}
    assert {name: reasons for name, reasons in unnamed.items() if reasons} == {}


# Files of the suite whose name is not that of a keyword.
_GROUPS = {"dynamicRef", "refRemote", "if-then-else", "vocabulary", "boolean_schema", "defs", "ecmascript-regex"}
