"""What programs and a terminal are told."""

from __future__ import annotations

import json
from pathlib import Path

from serve.replay.report import ReplayReport, share_text
from serve.replay.summary import CountedShare
from serve.replay.versions import find_versions
from tests.serve.replay.test_summary import tallied
from tests.serve.replay.test_versions import weights


def report_of(tmp_path: Path) -> ReplayReport:
    for side in ("a", "b"):
        weights(tmp_path / side / "mild" / "alora", "mild", side)
    weights(tmp_path / "b" / "new" / "alora", "new", "x")
    versions = find_versions(tmp_path / "a", tmp_path / "b")
    replay = tallied([(0.1, 0.2), (0.1, 0.9), (0.7, 0.3), (None, 0.9)]).result()
    return ReplayReport("tiny", 4, {"a.jsonl": 100}, versions, (replay,))


def test_the_file_says_which_versions_differ_where(tmp_path: Path) -> None:
    report_of(tmp_path).save(tmp_path)
    facts = json.loads((tmp_path / "replay.json").read_text())
    assert facts["conversations"] == 4 and facts["sources"] == {"a.jsonl": 100}
    assert facts["rules_of_b_only"] == ["new"] and facts["rules_of_a_only"] == []
    mild = facts["rules"]["mild"]
    assert mild["a"]["version"] != mild["b"]["version"]
    assert mild["flips"]["count"] == 2 and mild["flips"]["share"] == 2 / 3
    assert mild["flips"]["ci95"] == list(CountedShare.of(2, 3).ci95)
    assert [changed["row"] for changed in mild["largest"]] == [1, 2, 0]
    assert mild["largest"][0]["source"] == "a.jsonl" and mild["shares_prefill"]


def test_a_terminal_gets_every_figure(tmp_path: Path) -> None:
    text = report_of(tmp_path).as_text()
    assert "judged by both        3 of 4" in text
    assert "1 by A only, 0 by B only, 0 by both" in text
    assert "allow -> violation" in text and "only in B: new" in text
    assert "least -0.400" in text and "most +0.800" in text


def test_a_share_is_written_with_its_interval() -> None:
    assert share_text(CountedShare.of(3, 2000)) == "3 (0.15 %, 95 % interval 0.03 to 0.44)"
