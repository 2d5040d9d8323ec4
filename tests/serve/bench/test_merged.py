"""The merged rule against its adapters: verdicts of every kind are measured, and logits agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.layout import Runs
from serve.bench import merged
from serve.bench.merged import MergedReport, run, table
from serve.merge import merge
from tests.serve.bench.small_engine import small_recipe
from tests.serve.cards import recipe
from tests.serve.guarded import save_adapter

pytestmark = pytest.mark.slow

NATS = 2e-3


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """A rule's LoRA and aLoRA."""
    runs = Runs(tmp_path)
    for method in ("lora", "alora"):
        save_adapter(runs.adapter("tiny", "pii_leak", method), "pii_leak", seed=3, method=method)
    return runs


def test_the_merged_rule_and_its_adapters_are_measured_and_logits_agree(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"CHECKS_PER_REPEAT": 3, "WORKERS": 2, "REPEATS": 1, "TOKENS": 80}.items():
        monkeypatch.setattr(merged, name, value)
    lora = runs.adapter("tiny", "pii_leak", "lora")
    merge(recipe(), lora, lora.with_name("merged"))
    report = run(small_recipe(), runs, "pii_leak")
    assert list(report.verdicts_per_second) == ["merged", "lora", "alora"]
    for rates in report.verdicts_per_second.values():
        assert len(rates) == 1 and rates[0] > 0
    assert 0 < report.difference_nats < NATS
    report.save(runs.root / "merged_bench.json")
    assert MergedReport.load(runs.root / "merged_bench.json") == report
    _, *lines, difference = table(report).splitlines()
    assert [line.split()[0] for line in lines] == ["merged", "lora", "alora"]
    assert difference.startswith("largest difference of a logit from the adapter's, float32:")


def test_a_rule_that_is_not_merged_is_refused_with_the_command(runs: Runs) -> None:
    with pytest.raises(GuardError, match=r"(?s)no merged checkpoint.*make merge"):
        run(recipe(), runs, "pii_leak")
