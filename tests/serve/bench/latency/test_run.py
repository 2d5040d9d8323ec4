"""The latency command: what it starts with, what it writes, and when it does nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from guard.errors import GuardError
from guard.layout import ROOT, Runs
from guard.method import METHODS
from serve.bench.latency import run as latency
from serve.bench.latency.grid import Cell, Repeat, Sample, full_grid, quick_grid, summarise
from serve.bench.latency.report import MODES, FurtherRow, LatencyReport, draw_rules, table
from serve.bench.latency.run import _current, _folders, _inputs, main, publish
from serve.bench.random_adapter import save_random_adapters
from tests.serve.guarded import (
    CONVERSATION,
    guard_engine,
    peft_logit,
    prompts,
    recipe,
    save_adapter,
    save_card,
)


def toy_report(
    adapters: str = "trained",
    left_out: tuple[str, ...] = (),
    grid: Sequence[Cell] = tuple(full_grid(2)),
    inputs: str = "inputs",
) -> LatencyReport:
    """A report of a grid with made-up times: LoRA 1 ms a token, aLoRA and the base share the conversation."""
    rows, ratios = [], []
    for cell in grid:
        shared = cell.prompt_tokens + 30.0 * cell.rules
        samples = {
            "base": Sample(shared, shared, (shared,) * cell.rules, 0, int(shared), 0),
            "lora": Sample(
                cell.rules * cell.prompt_tokens,
                1.0,
                (1.0,) * cell.rules,
                0,
                cell.rules * cell.prompt_tokens,
                0,
            ),
            "alora": Sample(1.2 * shared, shared, (shared,) * cell.rules, 0, int(shared), 2),
        }
        found, ratio = summarise(
            cell,
            [Repeat(samples, int(shared), shared, shared, min(int(shared) - 1, 4000))]
            * cell.repeats,
            suffix_tokens=30,
        )  # type: ignore[arg-type]
        rows += found
        ratios.append(ratio)
    return LatencyReport(
        commit="abc1234",
        hardware="two cores",
        versions={"vllm": "0.32.0", "torch": "2.13.0"},
        model="tiny",
        peak_memory_mib=2345.6,
        adapters=adapters,  # type: ignore[arg-type]
        inputs=inputs,
        engine={"block_size": "32"},
        left_out=left_out,
        cells=tuple(rows),
        ratios=tuple(ratios),
        further=(
            FurtherRow(prompt_tokens=1000, rules=1, up_to=5, ms=36.0, ms_low=30.0, ms_high=40.0),
        ),
    )


def test_the_report_comes_back_from_its_file(tmp_path: Path) -> None:
    report = toy_report()
    report.save(tmp_path / "latency.json")
    assert LatencyReport.load(tmp_path / "latency.json") == report


def test_the_file_has_the_fields_that_others_read(tmp_path: Path) -> None:
    toy_report().save(tmp_path / "latency.json")
    content = json.loads((tmp_path / "latency.json").read_text())
    assert {"commit", "hardware", "versions", "model", "cells"} <= content.keys()
    fields = "prompt_tokens suffix_tokens rules mode wall_ms mean_ms p50_ms p95_ms p99_ms cached_tokens computed_tokens repeats"
    assert set(fields.split()) <= content["cells"][0].keys()


def test_the_table_has_a_line_for_every_cell_and_says_where_it_comes_from() -> None:
    report = toy_report(left_out=("5000 tokens x 100 rules",))
    text = table(report)
    line = next(line for line in text.splitlines() if line.split()[:2] == ["1000", "100"])
    assert "100000" in line and "20.8x" in line and "1.20x" in line  # 100,000 / (1.2 * 4,000)
    assert "*" not in line
    assert "a rule more on 1,000 tokens, from 1 to 5: 36.00 ms (30.00 to 40.00)" in text
    assert "*" in next(
        line for line in text.splitlines() if line.split()[:2] == ["5000", "100"]
    )  # longer than the context
    assert "left out: 5000 tokens x 100 rules" in text
    assert "while the clock ran: 2; peak memory of the process: 2,346 MiB" in text
    assert "two cores" in text and "abc1234" in text
    assert "RANDOM WEIGHTS" not in text and "RANDOM WEIGHTS" in table(toy_report("random weights"))


def test_the_report_and_both_plots_are_written(tmp_path: Path) -> None:
    publish(toy_report(), Runs(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latency.json",
        "latency_length.png",
        "latency_rules.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))


@pytest.mark.parametrize("lengths", [(1000,), (1000, 5000)])
def test_a_plot_shows_its_whole_legend(
    lengths: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(figure: Figure, path: Path) -> None:
        figure.draw_without_rendering()
        (legend,) = figure.legends
        shown = legend.get_window_extent()
        assert figure.bbox.x0 <= shown.x0 and shown.x1 <= figure.bbox.x1
        assert shown.y1 <= figure.bbox.y1
        assert all(shown.y0 >= axes.get_tightbbox().y1 for axes in figure.axes)

    monkeypatch.setattr(Figure, "savefig", drawn)
    draw_rules(toy_report(), lengths, tmp_path / "rules.png")


def test_without_trained_adapters_nothing_is_measured_and_the_flag_for_random_ones_is_named(
    tmp_path: Path,
) -> None:
    with (
        pytest.raises(GuardError, match=r"make train.*--random"),
        _folders(recipe(), Runs(tmp_path), is_random=False),
    ):
        pytest.fail("no adapters, but the benchmark went on")


def test_an_adapter_of_another_base_is_left_out_with_its_remedy(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = save_adapter(
        runs.adapter("tiny", "pii_leak", "alora"), "pii_leak", seed=1, method="alora"
    )
    card = json.loads((stale / "card.json").read_text())
    (stale / "card.json").write_text(json.dumps(card | {"base_revision": "0" * 64}))
    with _folders(recipe(), runs, is_random=False) as found:
        assert found == {
            method: [runs.adapter("tiny", "medical_advice", method)] for method in METHODS
        }
    printed = capsys.readouterr().out
    assert (
        printed.startswith("left out: ")
        and "trained on another base" in printed
        and "make train RULE=pii_leak MODEL=" in printed
    )
    shutil.rmtree(runs.root / "tiny" / "medical_advice" / "alora")
    with (
        pytest.raises(GuardError, match=r"another base.*make train RULE=pii_leak.*--random"),
        _folders(recipe(), runs, is_random=False),
    ):
        pytest.fail("nothing to serve, but the benchmark went on")


def test_random_adapters_have_the_recipe_s_rank_and_are_served_like_trained_ones(
    tmp_path: Path,
) -> None:
    engine = guard_engine()
    for method in METHODS:
        save_random_adapters([tmp_path / method], recipe(), method, prompts())
        config = json.loads((tmp_path / method / "adapter_config.json").read_text())
        assert config["r"] == recipe().adapters[method].lora["r"]
        engine.add(f"random {method}", tmp_path / method)
        rule_text = engine.rules[f"random {method}"].rule_text
        verdict = engine.check(CONVERSATION, [f"random {method}"]).verdicts[0]
        engine.remove(f"random {method}")
        expected = peft_logit(CONVERSATION, rule_text, tmp_path / method)
        assert verdict.logit == pytest.approx(expected, abs=5e-4)
        assert verdict.logit != pytest.approx(peft_logit(CONVERSATION, rule_text, None), abs=2e-3)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """A folder with one trained rule."""
    runs = Runs(tmp_path)
    for method in METHODS:
        save_adapter(
            runs.adapter("tiny", "medical_advice", method), "medical_advice", seed=1, method=method
        )
    yield runs


def test_a_benchmark_depends_on_its_adapters_model_packages_and_code(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders: dict[str, list[Path]] = {
        method: [runs.adapter("tiny", "medical_advice", method)] for method in METHODS
    }
    before = _inputs(recipe(), folders, False)
    assert _inputs(recipe(), folders, False) == before
    assert _inputs(recipe(), folders, True) != before
    assert _inputs(recipe().model_copy(update={"name": "other"}), folders, False) != before
    edited = tmp_path / "prompt.py"
    edited.write_text("# another version")
    for name, value in (
        ("versions", lambda: {"vllm": "9.9"}),
        ("CODE", tuple(edited if path.name == edited.name else path for path in latency.CODE)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(latency, name, value)
            assert _inputs(recipe(), folders, False) != before
    other = save_adapter(runs.root / "other", "medical_advice", seed=2)
    shutil.copytree(other, folders["alora"][0], dirs_exist_ok=True)
    save_card(folders["alora"][0], "medical_advice")
    assert _inputs(recipe(), folders, False) != before


def test_a_full_grid_stands_for_a_coarse_one_and_not_the_other_way_round(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    assert _current(path, "inputs", quick_grid(5)) is None
    toy_report().save(path)
    assert (
        _current(path, "inputs", quick_grid(5))
        == _current(path, "inputs", full_grid(2))
        == toy_report()
    )
    assert _current(path, "inputs", full_grid(3)) is None
    assert _current(path, "other inputs, of another model for example", quick_grid(5)) is None
    toy_report(grid=quick_grid(2)[:-1]).save(path)
    assert _current(path, "inputs", full_grid(2)) is None
    assert _current(path, "inputs", quick_grid(2)) is not None  # its last cell may be missing
    path.write_text('{"model": "tiny"}')
    assert _current(path, "inputs", quick_grid(2)) is None


def test_the_command_measures_once_and_then_says_that_nothing_changed(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        latency,
        "run",
        lambda *_, **settings: calls.append(settings) or toy_report(inputs="of this run"),
    )
    monkeypatch.setattr(latency, "_inputs", lambda *_: "of this run")
    monkeypatch.setattr("sys.argv", ["latency", "--quick", "--runs", str(runs.root)])
    main()
    assert "LoRA/aLoRA" in capsys.readouterr().out
    main()
    assert "nothing changed" in capsys.readouterr().out
    assert len(calls) == 1 and calls[0]["seconds"] is not None
    monkeypatch.setattr("sys.argv", ["latency", "--quick", "--force", "--runs", str(runs.root)])
    main()
    assert len(calls) == 2


MEASURE = """
import sys
from pathlib import Path
from guard.layout import Runs
from guard.recipe import load_recipe
from serve.bench.latency.grid import Cell
from serve.bench.latency.run import run
recipe = load_recipe("tiny")
recipe = recipe.model_copy(update={"engine": recipe.engine | {"max_loras": 2, "kv_cache_memory_bytes": 2**27}})
folders = {method: [Path(sys.argv[1]) / "tiny" / "medical_advice" / method] for method in ("lora", "alora")}
run(recipe, folders, [Cell(100, 2, 2), Cell(9000, 1, 1)], is_random=True).save(Runs(Path(sys.argv[1])).latency)
"""


def test_a_grid_is_measured_on_the_real_engine_with_as_many_adapters_as_rules(runs: Runs) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(runs.root)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = LatencyReport.load(runs.latency)
    assert (
        "with 4 adapters" in done.stdout and "with 2 adapters" in done.stdout
    )  # an engine for each part of the grid
    assert report.engine["max_loras"] == "4, 2"
    base, lora, alora = (report.cell(100, 2, mode) for mode in MODES)
    assert lora.cached_tokens == 0 < base.cached_tokens < alora.cached_tokens
    assert lora.computed_tokens - lora.cached_tokens > alora.computed_tokens
    assert 0 < alora.engine_ms <= alora.wall_ms and alora.repeats == 2
    assert 8900 < report.cell(9000, 1, "alora").computed_tokens < 9100 > recipe().context_tokens
    assert "beyond what the base was made for" in table(report)


def test_fewer_than_one_repeat_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("sys.argv", ["latency", "--repeats", "0"])
    with pytest.raises(SystemExit):
        main()
    assert "at least 1" in capsys.readouterr().err
