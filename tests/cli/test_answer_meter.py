"""The line below an answer: its tokens, their pace, the time to the first."""

from __future__ import annotations

from mlserver_torch_stream.cli.chat import AnswerMeter
from mlserver_torch_stream.client import Delta, RequestUsage


def _summary(*deltas: tuple[float, Delta]) -> str:
    meter = AnswerMeter(100.0)
    for now, delta in deltas:
        meter.add(delta, now)
    return meter.summary()


def test_the_servers_count_beats_the_number_of_events() -> None:
    usage = RequestUsage(5, 21)
    assert _summary((100.5, Delta("a")), (102.5, Delta("b", usage=usage, final=True))) == (
        "21 tokens, 10.0 tokens/s, first token after 0.50 s"
    )


def test_tokens_that_come_with_the_first_are_no_pace() -> None:
    """A reader that lags gets its first tokens in one event."""
    assert _summary((101, Delta("abc", token_ids=(1, 2, 3))), (103, Delta("d", token_ids=(4,)))) == (
        "4 tokens, 0.5 tokens/s, first token after 1.00 s"
    )
    assert _summary((101, Delta("abc", token_ids=(1, 2, 3)))) == "3 tokens, first token after 1.00 s"


def test_an_answer_that_nobody_counts_is_estimated_by_its_events() -> None:
    assert _summary((101, Delta("a")), (102, Delta("b")), (103, Delta("c"))) == (
        "~3 tokens, 1.0 tokens/s, first token after 1.00 s"
    )


def test_an_event_without_token_and_text_is_no_first_token() -> None:
    last = Delta("a", usage=RequestUsage(1, 1), final=True)
    assert _summary((101, Delta()), (104, last)) == "1 token, first token after 4.00 s"


def test_a_token_whose_text_is_held_back_is_the_first() -> None:
    assert _summary((101, Delta(token_ids=(7,))), (104, Delta("a", token_ids=(8,)))) == (
        "2 tokens, 0.3 tokens/s, first token after 1.00 s"
    )


def test_an_answer_without_a_token_has_no_line() -> None:
    assert _summary((101, Delta(final=True))) == ""
