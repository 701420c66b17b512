"""Goodput of made-up answers, worked out by hand, and its picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path

from benchmarks.answers import Answer
from benchmarks.goodput import BOUNDS, Bounds, Line, as_lines, goodput, picture, read_lines

MACHINE = {"date": "2026-01-01T00:00:00+00:00", "cpu": "some <CPU>", "cores": 2}
HEAD = {"machine": MACHINE, "model": "embedded://m", "prompt_tokens": 8, "new_tokens": 4}


def _line(ttft_ms: float, pause_ms: float, streams: int = 2, server: str = "ours") -> Line:
    return Line(server, streams, ttft_ms, pause_ms, new_tokens=10, level_s=4.0)


def test_a_request_is_good_within_both_bounds() -> None:
    lines = [_line(100, 50), _line(101, 50), _line(100, 51), _line(20, 10)]
    assert goodput(lines, Bounds(100, 50)) == {"ours": {2: 5.0}}
    assert goodput(lines) == {"ours": {2: 10.0}}
    assert goodput(lines, Bounds(1, 1)) == {"ours": {2: 0.0}}, "a level without a good request is 0, not missing"


def test_a_line_has_the_first_token_the_longest_pause_and_the_levels_duration() -> None:
    answers = [Answer(1.0, 3.0, (1.5, 1.75, 2.75), 8, 3), Answer(2.0, 5.0, (2.25,), 8, 1)]
    first, second = as_lines("ours", 2, answers)
    assert (first.ttft_ms, first.pause_ms, first.new_tokens, first.level_s) == (500, 1000, 3, 4)
    assert (second.ttft_ms, second.pause_ms) == (250, 0), "an answer of one event has no pause"


def test_a_later_run_replaces_the_levels_that_it_measured(tmp_path: Path) -> None:
    runs = [[_line(1, 1), _line(2, 2), _line(3, 3, streams=4)], [_line(9, 9)]]
    texts = [json.dumps(text) for run in runs for text in ({"run": len(run)}, *map(asdict, run))]
    file = tmp_path / "chip.jsonl"
    file.write_text("\n".join(texts))
    head, lines = read_lines(file)
    assert head == {"run": 1}
    assert [(line.streams, line.ttft_ms) for line in lines] == [(2, 9), (4, 3)]


def test_the_picture_is_xml_that_names_servers_bounds_and_numbers() -> None:
    lines = [_line(100, 50, streams, server) for streams in (1, 2) for server in ("ours", "a & b")]
    root = ElementTree.fromstring(picture(HEAD, lines))
    texts = [element.text or "" for element in root.iter()]
    assert {"ours", "a & b"} <= set(texts) and any("some <CPU>" in text for text in texts)
    assert sum("TTFT ≤" in text for text in texts) == len(BOUNDS)
    assert any("ours: 2 at 1, 2 at 2" in text for text in texts), "the numbers are there for readers without eyes"
    lines_drawn = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert len(lines_drawn) == len(BOUNDS) * 2 * 2, "each plot has a line and a dashed line for each server"
