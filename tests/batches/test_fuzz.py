"""Any form, body of a batch or row is either accepted, or refused with an error that names a field."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlserver_torch_stream.cloud.batches.batch_record import IdMaker
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.bodies import fields, read
from mlserver_torch_stream.protocol.openai_batch import read_body, read_custom_id
from mlserver_torch_stream.protocol.openai_batch_models import BATCH, FILE, BatchRequest, FileQuery, is_id
from mlserver_torch_stream.protocol.openai_models import ChatCompletionRequest
from mlserver_torch_stream.protocol.openai_request import decode_body
from mlserver_torch_stream.protocol.parameters import PARAMETERS
from mlserver_torch_stream.protocol.values import printable
from mlserver_torch_stream.server.rest.forms import FormReader, PartBegan, PartEnded, PartPiece
from mlserver_torch_stream.types import ModelInfo

_TYPE = "multipart/form-data; boundary=b"
_HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from(["input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"])
_GOOD = {"input_file_id": IdMaker().make(FILE), "endpoint": "/v1/completions", "completion_window": "24h"}


def _pieces(body: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    return [body[start:end] for start, end in pairwise(places)]


@given(st.binary(max_size=300), st.lists(st.integers(0, 1000), max_size=8))
def test_a_file_is_read_alike_however_its_form_is_cut(content: bytes, cuts: list[int]) -> None:
    if b"\r\n--b" in b"\r\n" + content + b"\r\n":
        return  # it would end the part
    form = FormReader(_TYPE)
    found = [event for piece in _pieces(_HEAD + content + b"\r\n--b--\r\n", cuts) for event in form.feed(piece)]
    assert found[0] == PartBegan("file", "f") and found[-1] == PartEnded() and form.complete
    assert b"".join(event.data for event in found if isinstance(event, PartPiece)) == content


@given(st.binary(max_size=400), st.lists(st.integers(0, 1000), max_size=4), st.booleans())
def test_no_bytes_break_the_reader_of_forms(content: bytes, cuts: list[int], begun: bool) -> None:
    form = FormReader(_TYPE)
    with suppress(InvalidInput):
        for piece in _pieces((_HEAD if begun else b"--b\r\n") + content, cuts):
            form.feed(piece)


@pytest.mark.long
@given(st.text(max_size=200))
def test_no_content_type_breaks_the_reader_of_forms(content_type: str) -> None:
    with suppress(InvalidInput):
        FormReader(content_type.encode("latin-1", "replace").decode("latin-1"))


@given(_NAMES, _JSON)
def test_a_bad_value_of_a_batch_names_its_field(name: str, value: Any) -> None:
    try:
        request = read({**_GOOD, name: value}, BatchRequest)
    except InvalidInput as error:
        assert error.field == name
    else:
        assert isinstance(request, BatchRequest)


@given(st.dictionaries(st.text(), _JSON, min_size=1, max_size=4))
def test_an_unknown_key_of_a_batch_is_named(body: dict[str, Any]) -> None:
    try:
        read({**_GOOD, **body}, BatchRequest)
    except InvalidInput as error:
        assert error.field in {printable(key) for key, value in body.items() if value is not None}
    else:
        assert {key for key, value in body.items() if value is not None} <= {*_GOOD, "metadata"}


_LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
_HELLO = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
_PARAMETERS = sorted({*fields(ChatCompletionRequest), *(each.name for each in PARAMETERS)} - {"model", "echo"})
_INFO = ModelInfo(vocab_size=100, max_model_len=64, max_num_seqs=4, has_chat_template=True)


@given(st.dictionaries(st.sampled_from([*_LINE, "body", "stream"]) | st.text(max_size=4), _JSON, max_size=4))
def test_any_key_of_a_row_is_taken_or_named(changes: dict[str, Any]) -> None:
    line = {**_LINE, "body": _HELLO, **changes}
    try:
        read_custom_id(line, "row-0")
        assert read_body(line) == line["body"]
    except InvalidInput as refusal:
        assert refusal.field in {*(printable(key) for key in changes), "messages"}, refusal.message


@pytest.mark.parametrize("name", _PARAMETERS)
def test_a_bad_value_in_the_body_of_a_row_is_refused_by_its_name(name: str) -> None:
    @settings(max_examples=8, deadline=None)
    @given(_JSON)
    def check(value: Any) -> None:
        try:
            decode_body(read_body({**_LINE, "body": {**_HELLO, name: value}}), _INFO, "r")
        except InvalidInput as refusal:
            assert refusal.field.partition(".")[0].partition("[")[0] == name, refusal.message

    check()


@given(st.dictionaries(st.sampled_from(["limit", "after", "order", "purpose", "x"]), st.text(max_size=30), max_size=3))
def test_a_bad_parameter_of_a_list_is_named_or_it_is_taken(query: dict[str, str]) -> None:
    try:
        found = read(query, FileQuery)
    except InvalidInput as error:
        assert error.field in query
    else:
        assert 1 <= found.limit <= 10_000 and (found.after is None or is_id(FILE, found.after))


@given(st.text(max_size=50))
def test_an_id_holds_nothing_that_leads_out_of_a_folder(text: str) -> None:
    for kind in (FILE, BATCH):
        if is_id(kind, text) or is_id(kind, kind + text):
            assert not set(text) & set("/\\.%\0\n")
