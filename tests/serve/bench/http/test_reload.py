"""Rules replaced under checks: what is right, and the benchmark, small, on the real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.card import load_card
from guard.method import PEFT_WEIGHTS
from guard.recipe import load_recipe
from serve.bench.http.reload import ReloadReport, ServedSpans, outcome, put_in_place, run, table
from tests.serve.cards import save_card

OF_VERSIONS = [-2.0, 2.0, 0.1, 0.2]


@pytest.mark.parametrize(
    ("logit", "served", "expected"),
    [
        (2.0, {1}, "right"),
        (2.04, {0, 1}, "right"),
        (2.0, {0}, "wrong_version"),
        (1.0, {0, 1, 2, 3}, "no_version"),
        (0.1, {2}, "told_nothing"),
        (0.1, {2, 3}, "right"),
    ],
)
def test_a_logit_tells_by_which_weights_it_was_given(
    logit: float, served: set[int], expected: str
) -> None:
    assert outcome(logit, OF_VERSIONS, served) == expected


def test_both_versions_may_answer_while_one_replaces_the_other() -> None:
    served = ServedSpans()
    served.start(0)
    (_, before, _) = served.spans[0]
    served.start(1)
    (_, since, _) = served.spans[1]
    assert served.between(before, since) == {0, 1}
    served.end_previous()
    until = served.spans[0][2]
    assert served.between(until + 1, until + 2) == {1}
    assert served.between(before, until + 2) == {0, 1}
    assert served.between(before - 2, before - 1) == set()


def test_a_version_takes_the_place_of_another(tmp_path: Path) -> None:
    version, folder = tmp_path / "versions" / "first", tmp_path / "rule" / "alora"
    for made in (version, folder):
        made.mkdir(parents=True)
        (made / PEFT_WEIGHTS).write_text(made.name)
        save_card(made, made.parent.name)
    put_in_place(version, folder)
    assert (folder / PEFT_WEIGHTS).read_text() == "first"
    assert load_card(folder).rule == "rule" and list(folder.parent.iterdir()) == [folder]


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_no_answer_is_lost_or_of_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.bench.http.reload.peak_of_processes_mib", lambda: 1e6)
    report = run(load_recipe("tiny"), checks=40, replacements=8, clients=4)
    assert report.errors == {} and report.unjudged_rules == 0
    assert report.wrong_version == report.no_version == 0
    assert report.right > 0.5 * report.checks * report.rules
    assert report.replacements == 8 and report.replacement_ms.min > 0
    assert report.peak_memory_mib == 1e6  # the server's
    path = tmp_path / "reload_bench.json"
    report.save(path)
    assert ReloadReport.load(path) == report
    assert "8 replacements of 8 rules during 40 checks" in table(report)
