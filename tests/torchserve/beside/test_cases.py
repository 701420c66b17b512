"""Our replies on TorchServe's paths, compared with recorded ones of TorchServe 0.12: the page says what was measured.

``make record-torchserve`` sends the requests to TorchServe itself, which needs a Java runtime, and writes recordings
and page again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.torchserve.beside import page, recordings, servers
from tests.torchserve.beside.case import FILES, Case
from tests.torchserve.beside.cases import GROUPS, Group
from tests.torchserve.beside.page import Measured
from tests.torchserve.beside.replies import ask
from tests.torchserve.beside.reply import Reply
from tests.torchserve.beside.servers import Addresses

pytestmark = pytest.mark.slow
_RECORDING = bool(os.environ.get("RECORD_TORCHSERVE"))
PAGE = "docs/torchserve/cases.md"
_LEAST_CASES = 60
_HEAD = """\
# TorchServe and here, case by case

The same clients send the same requests to TorchServe 0.12 and to our server (`serve-torchserve`); both serve the same
folder of models and configuration. `make record-torchserve` records TorchServe's replies, for which it needs a Java
runtime, and writes this page. `tests/torchserve/beside/test_cases.py` compares our replies with the recorded ones, and
fails if the result differs from this page. `/predictions/…` stands for a path of the REST port, and `management:` for
the address of the management API. `grpc inference:METHOD` is a call of the gRPC service, with fields of the request,
entries of its `input`, metadata, and seconds until the deadline; `+` begins another request of the same call, which is
sent after the reply to the previous one. The handlers are in
[handlers.py](../../tests/torchserve/beside/handlers.py): `echo` returns the data that it received, `do` carries out the
command in the body.

The comparison covers the status, each header, the bytes of each chunk, and how the connection ends; for gRPC the code,
its details, the metadata, and the bytes of each message. `<id>` stands for a new request id, `<its own>` for a value
that differs between two starts of the same server, `<token>` for the token of the management API.
In {same} of {count} cases the replies are the same. The tables show the other cases; below each table are the names of
those with the same replies. The folder tests/torchserve/beside has the requests of all cases, and its file
torchserve-0.12.jsonl the recorded replies. The tables leave out what differs in many cases:

- TorchServe closes the connection after a status of 400 or above, and sends neither `date` nor `server`.
- Our replies with 503 have `retry-after` if a retry makes sense, and our streams have `x-accel-buffering: no`.
- Our replies on MLServer's own paths lack `x-request-id`, `pragma`, `cache-control` and `expires`.
- Both management ports need no token, except in the section on tokens.
- TorchServe sends no reason phrase after the status (`HTTP/1.1 200`).
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sequence[Measured]]:
    folder = tmp_path_factory.mktemp("beside")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    found: dict[str, list[Measured]] = {}
    recorded = {} if _RECORDING else recordings.read()
    for number, group in enumerate(GROUPS):
        place = folder / str(number)
        for each in (*group.models, *group.registered):
            each.write(place)
        if _RECORDING:
            recorded |= {case.name: replies for case, replies in _theirs(group, place, folder).items()}
        servers.configure(place, group.models, group.properties)
        with servers.ours(place, group.models, token="secret" if group.tokens else "") as addresses:
            ours = _replies(group, addresses, folder)
        for section, cases in group.sections.items():
            found.setdefault(section, []).extend((case, recorded[case.name], ours[case]) for case in cases)
    if _RECORDING:
        recordings.write(recorded)
    return found


def _theirs(group: Group, place: Path, files: Path) -> dict[Case, list[Reply]]:
    assert not servers.missing(), servers.missing()
    with servers.torchserve(place, group.models, group.properties, tokens=group.tokens) as addresses:
        return _replies(group, addresses, files)


def _replies(group: Group, addresses: Addresses, files: Path) -> dict[Case, list[Reply]]:
    cases = [case for cases in group.sections.values() for case in cases]
    return {case: ask(case.requests, case.together, addresses, files) for case in cases}


def _all(measured: Mapping[str, Sequence[Measured]]) -> list[tuple[Case, bool]]:
    """Returns each case, and whether both replies are the same."""
    return [(case, page.are_the_same(theirs, ours)) for rows in measured.values() for case, theirs, ours in rows]


def test_there_are_enough_cases_and_each_is_recorded(measured: Mapping[str, Sequence[Measured]]) -> None:
    names = [case.name for case, _ in _all(measured)]
    assert len(names) >= _LEAST_CASES and len(set(names)) == len(names)
    assert set(recordings.read()) == set(names)


def test_a_case_differs_where_it_says_why_and_nowhere_else(measured: Mapping[str, Sequence[Measured]]) -> None:
    cases = _all(measured)
    assert [case.name for case, same in cases if not same and not case.why] == [], "differ, and nothing says why"
    assert [case.name for case, same in cases if same and case.why] == [], "say why they differ, and do not"


def test_the_page_is_what_was_measured(measured: Mapping[str, Sequence[Measured]]) -> None:
    cases = _all(measured)
    head = _HEAD.format(count=len(cases), same=sum(same for _, same in cases))
    page.hold(PAGE, "\n".join([head.rstrip("\n"), *page.sections(measured), ""]))
