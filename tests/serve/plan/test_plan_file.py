"""A plan's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.plan.plan_file import PLANS, load_plan


def test_every_plan_loads_and_a_file_of_one_s_own(tmp_path: Path) -> None:
    for path in PLANS.glob("*.yaml"):
        assert load_plan(path.stem).name == path.stem
    (tmp_path / "mine.yaml").write_text("name: mine\nprice_an_hour: 3\n", encoding="utf-8")
    assert load_plan(str(tmp_path / "mine.yaml")).price_an_hour == 3


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ("traffic: {rate: 0.0}", "'traffic.rate'.*greater than 0.*got 0"),
        ("traffic: {rules_a_check: [5, 2]}", "least and most, of the 100 rules"),
        ("traffic: {groups: 10}", "of the 10 rules of a group.*got 5, 20"),
        ("traffic: {lengths: [300, 100]}", "quantiles.*rising"),
        ("traffic: {turns: 0.5}", "'traffic.turns'"),
        ("traffic: {rate: 1.0e+999}", "'traffic.rate'.*finite number"),
        ("p99_ms: .nan", "'p99_ms'"),
        ("trafic: {rate: 1.0}", "unknown key 'trafic'. Did you mean 'traffic'"),
        ("model: tiny", "price_an_hour"),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path: Path, stated: str, words: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"name: mine\n{stated}\n", encoding="utf-8")
    with pytest.raises(GuardError, match=words):
        load_plan(str(tmp_path / "mine.yaml"))
