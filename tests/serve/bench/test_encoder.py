"""An encoder's rules are measured by method, length and number; a decoder is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from guard.errors import GuardError
from guard.layout import Runs
from guard.recipe import Recipe
from serve.bench import encoder
from serve.bench.encoder import (
    FULL,
    NOBODY,
    QUICK,
    EncoderCell,
    EncoderGrid,
    EncoderReport,
    _inputs,
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
    assert report.adapters == {"minilm": {"lora": "trained", "head": "trained"}}
    assert report.engine["max_loras"] == "3" and report.engine_beside == {}
    assert len(table(report).splitlines()) == 3 + len(report.cells)


@pytest.mark.slow
def test_what_has_not_changed_is_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(tmp_path)
    folder = save_encoder_rule(runs.adapter("minilm", "toy", "lora"), seed=1)
    eager = recipe().model_copy(update={"engine": recipe().engine | {"enforce_eager": True}})
    said: list[bool] = []
    picture = tmp_path / "encoder_bench.png"
    for seed in (None, None, 2):
        if seed is not None:
            save_encoder_rule(folder, seed=seed)
        publish_run(eager, runs, EncoderGrid((1,), (80,), 1))
        said.append("nothing changed" in capsys.readouterr().out)
        picture.unlink()  # it is there each time
    assert said == [False, True, False]


def test_a_full_grid_stands_for_one_of_no_more_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(recipe: Recipe, runs: Runs, _: object, grid: EncoderGrid) -> EncoderReport:
        return toy_report(_inputs(recipe, runs, None, grid), grid.repeats)

    monkeypatch.setattr(encoder, "run", measured)
    said: list[bool] = []
    for grid in (FULL, QUICK, FULL, replace(FULL, repeats=FULL.repeats + 1)):
        publish_run(recipe(), Runs(tmp_path), grid)
        said.append("nothing changed" in capsys.readouterr().out)
    assert said == [False, True, True, False]


def test_a_report_depends_on_its_machine_s_threads_and_on_the_code_of_its_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _inputs(recipe(), Runs(tmp_path), None, FULL)
    with monkeypatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "7")
        assert _inputs(recipe(), Runs(tmp_path), None, FULL) != before
    named: list[object] = []
    monkeypatch.setattr(encoder, "fingerprint", lambda *inputs: named.extend(inputs))
    _inputs(recipe(), Runs(tmp_path), None, FULL)
    files = {path.name for path in named if isinstance(path, Path)}
    assert files >= {"encoder.py", "prompts.py", "random_adapter.py", "adapter_folders.py"}


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
    assert [cell.swap_ins for cell in report.cells] == [0] * len(report.cells)
    assert report.engine_beside["dtype"] == small_recipe().serving_dtype
    assert report.engine_beside["max_loras"] == "6"  # of both methods
    assert report.adapters["tiny"] == {"lora": "random weights", "alora": "random weights"}
    assert "aLoRAs on tiny are faster than adapters on minilm" in table(report)
    draw(report, tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        assert image.height == 750


def toy_report(inputs: str, repeats: int) -> EncoderReport:
    return EncoderReport(
        commit="abc1234",
        hardware="two cores",
        versions={},
        model="minilm",
        peak_memory_mib=1.0,
        inputs=inputs,
        threads=2,
        engine={},
        beside=NOBODY,
        engine_beside={},
        adapters={"minilm": {"lora": "trained"}},
        repeats=repeats,
        cells=tuple(_line(1, 2, 3)),
    )


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
            swap_ins=0,
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
