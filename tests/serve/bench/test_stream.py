"""A growing reply costs its new tokens and suffixes; the naive way costs the text every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.bench import stream
from serve.bench.stream import StreamReport, run, table
from tests.serve.bench.small_engine import small_recipe

pytestmark = pytest.mark.slow


def test_both_ways_are_counted_and_a_stream_computes_little_more_than_it_must(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {"RULES": 20, "CONVERSATION_TOKENS": 80, "REPLY_TOKENS": 200, "REPEATS": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(stream, name, value)
    report = run(small_recipe())
    streamed, naive = report.ways["stream"], report.ways["naive"]
    assert streamed.checks >= 200 // 17 and report.reply_tokens >= 200
    assert streamed.needed_tokens <= streamed.computed_tokens <= 1.2 * streamed.needed_tokens
    assert naive.computed_tokens > 1.5 * naive.needed_tokens
    assert naive.rule_by_rule_tokens > naive.computed_tokens
    report.save(tmp_path / "stream_bench.json")
    assert StreamReport.load(tmp_path / "stream_bench.json") == report
    assert table(report).splitlines()[2].split()[0] == "stream"
