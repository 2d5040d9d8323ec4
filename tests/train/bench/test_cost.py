"""The training benchmark on its smallest grid: both sides really train, and the report says what was measured."""

from __future__ import annotations

from pathlib import Path

from guard.prompt import PromptBuilder
from guard.recipe import MODELS
from train.bench.cost import (
    SUFFIX,
    Grid,
    RunCell,
    StepCell,
    draw,
    measure,
    pool,
    random_rows,
    table,
)

BUILDER = PromptBuilder.from_base(str(MODELS / "tiny"))


def test_rows_have_the_stated_lengths_and_one_rule_turn() -> None:
    header = BUILDER.invocation("a rule")
    for row, length in zip(random_rows(BUILDER, [40, 90]), [40, 90], strict=True):
        assert row.prompt.invocation_start == length
        assert len(row.prompt.token_ids) == length + SUFFIX
        assert row.prompt.token_ids[length : length + len(header)] == tuple(header)


def test_the_pool_is_as_long_as_conversations_are() -> None:
    lengths = sorted(row.prompt.invocation_start for row in pool(BUILDER, 400))
    assert 250 < lengths[200] < 350
    assert 40 <= lengths[0] < 100
    assert 1000 < lengths[-1] <= 2000


def test_both_sides_are_measured() -> None:
    (cell,), runs = measure(
        Grid(
            bases=("tiny",),
            prefixes=(600,),
            repeats=1,
            steps=2,
            examples=8,
            epochs=1,
            rules=(1, 2),
            adapter_steps=2,
        )
    )
    assert min(*cell.trl_s, *cell.cached_s) > 0
    assert cell.trl_mib > cell.cached_mib
    assert [(run.side, run.rules) for run in runs] == [
        ("TRL + PEFT", 1),
        ("cached prefixes", 1),
        ("cached prefixes", 2),
    ]
    assert all(run.seconds > 0 and run.measured == 1.0 for run in runs)


def test_the_table_states_times_and_ratios(tmp_path: Path) -> None:
    cell = StepCell(
        "tiny", 1000, 24, (2.0, 1.9, 2.2), (0.5, 0.4, 0.6), (0.1, 0.1, 0.1), 800.0, 200.0
    )
    runs = [
        RunCell("TRL + PEFT", 1, 300.0, 1.0),
        RunCell("cached prefixes", 1, 60.0, 1.0),
        RunCell("cached prefixes", 10, 240.0, 0.5),
    ]
    text = table([cell], runs)
    assert (
        "| tiny | 1,000 | 2,000 (1,900 to 2,200) | 500 (400 to 600) | 4.0x | 100 (100 to 100) | 20.0x | 800 | 200 | 25% |"
        in text
    )
    assert "| TRL + PEFT | 1 | 300 | 5.0x | 100% |" in text
    assert "| cached prefixes | 10 | 240 | 4.0x | 50% |" in text
    draw([cell], runs, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
