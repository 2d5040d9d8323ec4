"""The encoder's benchmark: what it writes, when it does nothing; a decoder is refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.home import ROOT
from guard.layout import Runs
from guard.recipe import Recipe
from serve.bench.encoder import run as encoder
from serve.bench.encoder.measure import EncoderGrid
from serve.bench.encoder.report import EncoderCell, EncoderReport, table
from serve.bench.encoder.run import FULL, QUICK, REPORT, _inputs, publish_run, run
from serve.engine import CODE
from tests.serve.bench.encoder.toy_report import toy_report
from tests.serve.bench.small_engine import small_recipe
from tests.serve.encoder_rules import recipe, save_encoder_head, save_encoder_rule
from tests.serve.guarded import recipe as decoder_recipe


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
    report = EncoderReport.load(tmp_path / REPORT)
    assert report.adapters == {"minilm": {"lora": "trained", "head": "random weights"}}
    assert report.engine["max_loras"] == "1" and report.engine_beside == {}


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


def test_a_report_depends_on_its_machine_s_threads_and_on_all_code_that_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _inputs(recipe(), Runs(tmp_path), None, FULL)
    with monkeypatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "7")
        assert _inputs(recipe(), Runs(tmp_path), None, FULL) != before
    edited = tmp_path / "measure.py"
    edited.write_text("# another version")
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "MEASURING_CODE", (*encoder.MEASURING_CODE, edited))
        assert _inputs(recipe(), Runs(tmp_path), None, FULL) != before
    files = set(encoder.MEASURING_CODE)
    assert set(CODE) < files
    for room in ("encoder", "workload"):
        of_room = set((ROOT / "serve" / "bench" / room).glob("*.py"))
        assert of_room and of_room < files
    assert {ROOT / "serve/bench" / f"{name}.py" for name in ("memory", "report", "scores")} < files


def test_a_report_names_the_weights_and_the_code_from_before_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both may change while it is measured; a report that named the new ones would be kept."""
    runs, code = Runs(tmp_path), tmp_path / "measure.py"
    code.write_text("# as it is imported")
    monkeypatch.setattr(encoder, "MEASURING_CODE", (code,))
    before = _inputs(recipe(), runs, None, QUICK)
    code.write_text("# edited meanwhile")

    def measured(*_: object) -> tuple[EncoderCell, ...]:
        save_encoder_rule(runs.adapter("minilm", "toy", "lora"), seed=1)
        return toy_report().cells

    monkeypatch.setattr(encoder, "measure", measured)
    monkeypatch.setattr(encoder, "methods_on", lambda *_: nullcontext([]))
    report = run(recipe(), runs, grid=QUICK)
    assert report.inputs == before != _inputs(recipe(), runs, None, QUICK)


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


def test_a_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="not an encoder"):
        run(decoder_recipe(), Runs(tmp_path))
