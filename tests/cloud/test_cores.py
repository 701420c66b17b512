"""Functions without I/O: window, batches, back-off, lines and rows, names and patterns."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.naming import glob_pattern, kind_of, part_name, part_number
from mlserver_torch_stream.cloud.parse import Lines, blank, parse_row
from mlserver_torch_stream.cloud.pipeline import RowBatcher, Window
from mlserver_torch_stream.cloud.rows import Failure, Kind, ObjectMissing, Outcome, Result, Row, StoreUnavailable
from mlserver_torch_stream.cloud.run_metrics import BusyTime
from tests.cloud.jobs import RUN


@given(st.data(), st.integers(1, 8), st.integers(1, 20), st.lists(st.integers(0, 25), max_size=30))
def test_a_window_delivers_in_order_and_never_holds_more_than_its_limits(
    data: st.DataObject, limit: int, most: int, weights: list[int]
) -> None:
    """The limits are a number and a weight. An item that is heavier than the limit is alone in the window."""
    window: Window[int] = Window(limit, most)
    inside: list[int] = []
    delivered: list[int] = []
    count, coming = len(weights), 0
    while len(delivered) < count:
        if coming < count and window.room(weights[coming]):
            assert window.enter(weights[coming]) == coming
            inside.append(coming)
            coming += 1
        elif inside:
            settled = inside.pop(data.draw(st.integers(0, len(inside) - 1)))
            window.settle(settled, settled)
        while window.ready:
            delivered.append(window.leave())
        undelivered = weights[len(delivered) : coming]
        assert len(window) == len(undelivered) <= limit
        assert sum(undelivered) <= most or len(undelivered) == 1
        assert window.peak_weight >= sum(undelivered)
    assert delivered == list(range(count)) and window.peak <= limit and window.peak_weight <= max([most, *weights])


def test_a_slow_head_closes_the_window_although_all_behind_it_is_settled() -> None:
    window: Window[str] = Window(3, 100)
    tickets = [window.enter(1) for _ in range(3)]
    window.settle(tickets[1], "b")
    window.settle(tickets[2], "c")
    assert not window.room(1) and not window.ready
    window.settle(tickets[0], "a")
    assert [window.leave() for _ in range(3)] == ["a", "b", "c"] and window.room(1)


@given(st.lists(st.integers(1, 12), max_size=40), st.integers(1, 5), st.integers(1, 10))
def test_batches_keep_every_item_in_order_within_both_bounds(weights: list[int], most: int, heaviest: int) -> None:
    batcher: RowBatcher[tuple[int, int]] = RowBatcher(most, heaviest, 1.0, lambda item: item[1])
    items = list(enumerate(weights))
    batches = [batch for item in items for batch in batcher.add(item, 0.0)]
    batches.append(batcher.flush())
    assert list(itertools.chain(*batches)) == items
    for batch in batches:
        assert len(batch) <= most
        assert len(batch) <= 1 or sum(weight for _, weight in batch) <= heaviest


def test_a_batch_leaves_when_its_first_item_has_waited_long_enough() -> None:
    batcher: RowBatcher[str] = RowBatcher(10, 100, 0.5, len)
    assert batcher.deadline is None
    batcher.add("a", 1.0)
    batcher.add("b", 1.4)
    assert batcher.deadline == 1.5
    assert not batcher.due(1.49)
    assert batcher.due(1.5) == ["a", "b"]
    assert batcher.deadline is None and not batcher.due(9.0)


def test_pauses_double_up_to_the_longest_and_respect_what_the_server_asks_for() -> None:
    retry = Retry(tries=9, first=0.1, longest=2.0)
    error = StoreUnavailable("later")
    assert [round(retry.pause(n, error, draw=1.0), 3) for n in range(1, 7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert retry.pause(3, error, draw=0.0) == 0.2
    assert retry.pause(1, StoreUnavailable("later", retry_after=1.5), draw=0.5) == 1.5
    assert retry.pause(1, StoreUnavailable("later", retry_after=60), draw=0.5) == 2.0


def test_only_what_may_help_is_tried_again_and_not_for_ever() -> None:
    for error, expected in ((StoreUnavailable("no"), 3), (ObjectMissing("no"), 1)):
        tried = []

        async def attempt(error: Exception = error, tried: list[int] = tried) -> None:
            tried.append(1)
            raise error

        with pytest.raises(type(error)):
            asyncio.run(Retry(tries=3, first=0.001).run(attempt))
        assert len(tried) == expected


@given(st.lists(st.binary(max_size=6).map(lambda line: line.replace(b"\n", b"")), max_size=8), st.integers(1, 9))
def test_lines_are_the_same_in_any_chunks(lines: list[bytes], size: int) -> None:
    body = b"\n".join(lines)
    splitter = Lines()
    found = [each for at in range(0, len(body), size) for each in splitter.feed(body[at : at + size])]
    found += splitter.end()
    expected = body.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert found == list(enumerate(expected, start=1))


def test_a_line_that_is_too_long_is_no_line_and_those_behind_it_are() -> None:
    splitter = Lines(most=4)
    assert [*splitter.feed(b"abcde"), *splitter.feed(b"fg\nxyz\n")] == [(1, None), (2, b"xyz")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": ', "line 7: is not JSON"),
        (b"[1]", "line 7: is not a JSON object"),
        (b'{"prompt": "\xff"}', "line 7: is not UTF-8: byte 12"),
        (b"[" * 100_000, "line 7: is "),
        (None, "line 7: is longer than"),
        (
            b'{"prompt": "a", "messages": []}',
            "prompt: exactly one of messages, prompt, input, text_input is needed, got messages and",
        ),
        (b'{"custom_id": "x"}', "messages: exactly one of messages, prompt, input, text_input is needed, got none"),
        (b'{"custom_id": 3, "prompt": "a"}', "custom_id: must be a string"),
        (b'{"prompt": 3}', "prompt: must be a string"),
        (b'{"messages": "hi"}', "messages: must be a list"),
        (b'{"body": 3}', "body: must be an object"),
    ],
)
def test_a_malformed_row_is_a_row_that_says_what_is_wrong_with_it(line: bytes | None, message: str) -> None:
    row = parse_row(3, "k", 7, line)
    assert row.failure is not None and message in row.failure.message
    refused = not message.startswith("line")
    assert (row.failure.code, row.failure.status) == (("invalid_request", 400) if refused else ("invalid_row", None))
    assert row.failure.error is None or row.failure.error["param"] == message.partition(":")[0]
    assert (row.index, row.key, row.line) == (3, "k", 7)


def test_rows_of_openai_batches_and_plain_ones() -> None:
    envelope = b'"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"'
    batch = b"{" + envelope + b', "body": {"messages": [{}], "max_tokens": 3}}'
    assert parse_row(0, "k", 1, batch).body == {"messages": [{}], "max_tokens": 3}
    plain = parse_row(0, "k", 1, b'{"prompt": "hi", "max_tokens": 3}')
    assert plain.body == {"prompt": "hi", "max_tokens": 3} and plain.custom_id == "k:1" and plain.failure is None
    assert blank(b" \r") and not blank(b"x") and not blank(None)


def test_an_output_row_has_a_response_or_an_error_and_survives_any_text() -> None:
    row = Row(4, "k\ud800", 2, "id-\ud800")
    good = json.loads(Result(row, Outcome({"text": "\ud800é"})).encode(RUN))
    assert good["response"]["body"] == {"text": "?é"} and good["error"] is None
    assert good["index"] == 4 and good["line"] == 2
    bad = json.loads(Result(row, Outcome(failure=Failure("c", "m"))).encode(RUN))
    assert bad["response"] is None and bad["error"] == {"code": "c", "message": "m"}


@pytest.mark.parametrize(
    ("glob", "key", "matches"),
    [
        ("*.jsonl", "a.jsonl", True),
        ("*.jsonl", "b/a.jsonl", False),
        ("**", "b/a.jsonl", True),
        ("**/*.jsonl", "a.jsonl", True),
        ("**/*.jsonl", "b/c/a.jsonl", True),
        ("b/?.txt", "b/c.txt", True),
        ("b/?.txt", "b/cc.txt", False),
        ("[ab]*.txt", "b1.txt", True),
        ("[!ab]*.txt", "b1.txt", False),
        ("a.b", "axb", False),
    ],
)
def test_globs(glob: str, key: str, matches: bool) -> None:
    assert bool(glob_pattern(glob).fullmatch(key)) is matches


def test_part_names_sort_as_their_numbers_and_nothing_else_is_one() -> None:
    assert part_number(part_name(42)) == 42 and part_number(part_name(1234567)) == 1234567
    assert all(part_number(name) is None for name in ("part-42.jsonl", "part-0000042.jsonl", "errors-000042.jsonl"))


def test_kinds_follow_from_endings_unless_told() -> None:
    assert kind_of("a/b.JSONL", None) is Kind.JSONL and kind_of("a.txt", None) is Kind.TEXT
    assert kind_of("a.png", None) is Kind.IMAGE and kind_of("a", None) is Kind.BYTES
    assert kind_of("a.txt", Kind.JSONL) is Kind.JSONL


def test_busy_counts_the_time_in_which_nothing_ran() -> None:
    busy = BusyTime()
    assert busy.share() is None
    for span in ((1.0, 2.0), (0.0, 3.0), (4.0, 5.0)):
        busy.add(*span)
    assert busy.share() == pytest.approx(0.8)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=30))
def test_busy_is_the_union_of_its_spans_whatever_their_order(spans: list[tuple[int, int]]) -> None:
    busy = BusyTime()
    for began, length in spans:
        busy.add(began, began + length)
    inside = {second for began, length in spans for second in range(began, began + length)}
    assert busy.share() == pytest.approx(len(inside) / (max(inside) + 1 - min(inside)))
    assert all(earlier[1] < later[0] for earlier, later in itertools.pairwise(busy.spans))
