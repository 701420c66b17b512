"""The simulated pauses of docs/scaling.md: the script prints the page's table, from steps that keep to their target."""

from __future__ import annotations

import pytest

from benchmarks import pauses
from tests import markdown


@pytest.mark.long
def test_the_script_prints_the_rows_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pauses, "RUNS", 1)
    monkeypatch.setattr(pauses, "PROMPTS", 2)
    pauses.main()
    head, _, *rows = capsys.readouterr().out.splitlines()
    page = markdown.read("docs/scaling.md").splitlines()
    shown = page[page.index(head) + 2 :][: len(rows)]
    assert [row.split("|")[1] for row in shown] == [row.split("|")[1] for row in rows]


def test_a_simulated_stream_pauses_for_as_long_as_its_steps_take() -> None:
    for target, character, longest in ((1000, "a", 1.25), (500, "a", 1.25), (500, "日", 2.0)):
        pause, _ = pauses.simulate("1.1 billion", target, character, seed=1)
        assert 0.8 * target < pause < longest * target
