from __future__ import annotations

from eval.judge.answer import JudgeRow
from eval.judge.record import endpoint_record


def row(
    text: str, latency_ms: float, *, refused: bool = False, tokens: int | None = 10
) -> JudgeRow:
    """An answer whose question and answer took as many tokens each."""
    return JudgeRow(text, tokens, tokens, latency_ms, refused=refused, key=text, id=text)


def test_only_answers_count_towards_time_and_cost() -> None:
    rows = [row("yes", 10.0), row("hm", 20.0, tokens=None), row("too long", 9e9, refused=True)]
    record = endpoint_record("m", "http://x", rows, lambda prompt, completion: prompt + completion)
    assert (record.refused, record.unparseable, record.without_usage) == (1, 1, 1)
    assert (record.latency_p50_ms, record.prompt_tokens, record.cost_usd) == (15.0, 10, 20)


def test_without_an_answer_nothing_is_known() -> None:
    record = endpoint_record("m", "http://x", [row("no", 1.0, refused=True)], lambda p, c: 1.0)
    assert (record.latency_p50_ms, record.prompt_tokens, record.cost_usd) == (None, None, None)


def test_an_answer_that_two_rows_share_is_paid_for_once_and_counts_for_both() -> None:
    rows = [row("hm", 10.0), row("hm", 10.0)]
    record = endpoint_record("m", "http://x", rows, lambda prompt, completion: prompt + completion)
    assert (record.unparseable, record.prompt_tokens, record.cost_usd) == (2, 10, 20)
