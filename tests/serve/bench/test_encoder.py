"""An encoder's rules are measured by method, length and number; a decoder is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from guard.errors import GuardError
from guard.layout import Runs
from serve.bench.encoder import (
    EncoderCell,
    EncoderGrid,
    EncoderReport,
    crossover,
    draw,
    publish_run,
    run,
    table,
)
from serve.bench.report import Spread
from tests.serve.bench.small_engine import small_recipe
from tests.serve.encoder_rules import recipe, save_encoder_head, save_encoder_rule
from tests.serve.guarded import recipe as decoder_recipe


@pytest.mark.slow
def test_frozen_heads_read_a_conversation_once_and_adapters_once_each(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    save_encoder_rule(runs.adapter("minilm", "toy", "lora"), seed=1)
    save_encoder_head(runs.adapter("minilm", "toy", "head"), seed=1)
    eager = recipe().model_copy(update={"engine": recipe().engine | {"enforce_eager": True}})
    report = run(eager, runs, grid=EncoderGrid((1, 3), (80,), 2))
    computed = {(cell.method, cell.rules): cell.computed_tokens for cell in report.cells}
    assert computed["lora", 3] == 3 * computed["lora", 1]
    assert computed["head", 3] == computed["head", 1] == computed["lora", 1] > 0
    assert all(0 < cell.wall_ms.min <= cell.wall_ms.max for cell in report.cells)
    report.save(tmp_path / "encoder_bench.json")
    assert EncoderReport.load(tmp_path / "encoder_bench.json") == report
    assert len(table(report).splitlines()) == 2 + len(report.cells)


@pytest.mark.slow
def test_what_has_not_changed_is_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(tmp_path)
    folder = save_encoder_rule(runs.adapter("minilm", "toy", "lora"), seed=1)
    eager = recipe().model_copy(update={"engine": recipe().engine | {"enforce_eager": True}})
    said: list[bool] = []
    for seed in (None, None, 2):
        if seed is not None:
            save_encoder_rule(folder, seed=seed)
        publish_run(eager, runs, EncoderGrid((1,), (80,), 1))
        said.append("nothing changed" in capsys.readouterr().out)
    assert said == [False, True, False]


@pytest.mark.slow
def test_beside_a_decoder_the_conversation_is_read_once_by_its_aloras(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    for method, save in (("lora", save_encoder_rule), ("head", save_encoder_head)):
        save(runs.adapter("minilm", "toy", method), seed=1)
    eager = recipe().model_copy(update={"engine": recipe().engine | {"enforce_eager": True}})
    report = run(eager, runs, small_recipe(), EncoderGrid((1, 3), (80,), 1))
    computed = {
        (cell.model, cell.method, cell.rules): cell.computed_tokens for cell in report.cells
    }
    assert computed["tiny", "lora", 3] == 3 * computed["tiny", "lora", 1]
    assert computed["tiny", "alora", 3] < computed["tiny", "alora", 1] + 20
    assert "aLoRAs on tiny are faster than adapters on minilm" in table(report)
    draw(report, tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        assert image.height == 750


def _line(*walls_ms: float) -> list[EncoderCell]:
    cells: list[EncoderCell] = []
    for rules, wall_ms in zip((1, 10, 100), walls_ms, strict=True):
        cell = EncoderCell(
            model="any",
            method="lora",
            tokens=10,
            rules=rules,
            wall_ms=Spread.of([wall_ms]),
            computed_tokens=1,
        )
        cells.append(cell)
    return cells


def test_the_crossover_lies_where_the_lines_of_log_ms_over_log_rules_meet() -> None:
    assert crossover(_line(1, 10, 100), _line(10, 10, 10)) == pytest.approx(10, rel=0.01)
    assert crossover(_line(1, 10, 100), _line(3.1623, 5, 5)) == pytest.approx(4.21, abs=0.01)
    assert crossover(_line(5, 50, 500), _line(1, 2, 3)) == 1
    assert crossover(_line(1, 2, 3), _line(9, 9, 9)) is None


def test_a_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="not an encoder"):
        run(decoder_recipe(), Runs(tmp_path))
