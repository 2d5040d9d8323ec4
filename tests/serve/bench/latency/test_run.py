"""The latency command: what it starts with, what it writes, and when it does nothing."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from guard.layout import Runs
from guard.recipe import MODELS, Recipe, load_recipe
from serve.bench.__main__ import main
from serve.bench.encoder import run as encoder
from serve.bench.latency import grid as latency_grid
from serve.bench.latency import run as latency
from serve.bench.latency.grid import Cell, full_grid, quick_grid
from serve.bench.latency.measure import Measured
from serve.bench.latency.report import LatencyReport, table
from serve.bench.latency.run import EnginePart, _current, _inputs, publish
from serve.bench.workload.random_adapter import random_adapters
from serve.engine import CODE
from tests.serve.bench.latency.toy_report import toy_report
from tests.serve.bench.small_engine import small_recipe
from tests.serve.cards import recipe, save_card
from tests.serve.guarded import save_adapter

CONTEXT = 1100  # tokens: as many as a warm-up needs


def test_the_report_and_both_plots_are_written(tmp_path: Path) -> None:
    publish(toy_report(), Runs(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latency.json",
        "latency_length.png",
        "latency_rules.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """A folder with one trained rule."""
    runs = Runs(tmp_path)
    for method in recipe().adapter_methods:
        save_adapter(
            runs.adapter("tiny", "medical_advice", method), "medical_advice", seed=1, method=method
        )
    return runs


def test_a_benchmark_depends_on_its_adapters_model_packages_and_code(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders: dict[str, list[Path]] = {
        method: [runs.adapter("tiny", "medical_advice", method)]
        for method in recipe().adapter_methods
    }
    before = _inputs(recipe(), folders, False)
    assert _inputs(recipe(), folders, False) == before
    assert _inputs(recipe(), folders, True) != before
    assert _inputs(recipe().model_copy(update={"name": "other"}), folders, False) != before
    edited = tmp_path / "prompt.py"
    edited.write_text("# another version")
    code = [path for path in latency.MEASURING_CODE if path.name != edited.name]
    for name, value in (
        ("versions", lambda: {"vllm": "9.9"}),
        ("MEASURING_CODE", (*code, edited)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(latency, name, value)
            assert _inputs(recipe(), folders, False) != before
    with monkeypatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "7")
        assert _inputs(recipe(), folders, False) != before
    files = {path.name for path in latency.MEASURING_CODE}
    assert set(CODE) < set(latency.MEASURING_CODE)
    own = {"run.py", "grid.py", "measure.py", "summary.py"}
    assert files >= own | {"adapter_folders.py", "prompts.py", "random_adapter.py"}
    assert files >= {"memory.py", "report.py", "scores.py"}
    retrained = save_adapter(runs.root / "other", "medical_advice", seed=2)
    shutil.copytree(retrained, folders["alora"][0], dirs_exist_ok=True)
    save_card(folders["alora"][0], "medical_advice")
    assert _inputs(recipe(), folders, False) != before


def test_a_report_names_the_weights_and_the_code_from_before_it_was_measured(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both may change while it is measured; a report that named the new ones would be kept."""
    code = tmp_path / "measure.py"
    code.write_text("# as it is imported")
    monkeypatch.setattr(latency, "MEASURING_CODE", (code,))
    folder = runs.adapter("tiny", "medical_advice", "alora")
    folders, tiny = {"alora": [folder]}, load_recipe("tiny")
    before = _inputs(tiny, folders, False)
    code.write_text("# edited meanwhile")

    def measured_while_it_is_trained(*_: object) -> EnginePart:
        retrained = save_adapter(runs.root / "other", "medical_advice", seed=2)
        shutil.copytree(retrained, folder, dirs_exist_ok=True)
        save_card(folder, "medical_advice")
        return EnginePart({}, Measured({}, ()), {})

    kept: list[LatencyReport] = []
    monkeypatch.setattr(latency, "_part", measured_while_it_is_trained)
    monkeypatch.setattr(latency, "publish", lambda report, _: kept.append(report))
    monkeypatch.setattr(latency, "adapter_folders", lambda *_, **__: nullcontext(folders))
    monkeypatch.setattr("sys.argv", ["bench", "latency", "--quick", "--runs", str(runs.root)])
    main()
    assert kept[0].inputs == before != _inputs(tiny, folders, False)


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


@pytest.mark.slow
def test_the_command_measures_once_and_then_says_that_nothing_changed(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []

    def measured(*_: object, **settings: Any) -> LatencyReport:
        calls.append(settings)
        return toy_report(inputs="of this run")

    monkeypatch.setattr(latency, "run", measured)
    monkeypatch.setattr(latency, "_inputs", lambda *_: "of this run")
    monkeypatch.setattr("sys.argv", ["bench", "latency", "--quick", "--runs", str(runs.root)])
    main()
    assert "LoRA/aLoRA" in capsys.readouterr().out
    picture = runs.root / "latency_rules.png"
    picture.write_text("of an older report")
    main()
    assert "nothing changed" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(calls) == 1 and calls[0]["seconds"] is not None
    monkeypatch.setattr(
        "sys.argv", ["bench", "latency", "--quick", "--force", "--runs", str(runs.root)]
    )
    main()
    assert len(calls) == 2


def test_an_encoder_is_measured_as_by_its_own_benchmark_beside_a_decoder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    published: list[tuple[object, ...]] = []
    monkeypatch.setattr(encoder, "publish_run", lambda *settings, **_: published.append(settings))
    options = ["--model", "minilm", "--runs", str(tmp_path), "--quick"]
    for name in ("latency", "encoder"):
        monkeypatch.setattr("sys.argv", ["bench", name, *options])
        main()
    of_latency, of_encoder = published
    assert of_latency == of_encoder and of_latency[3] == load_recipe("tiny")


@pytest.mark.parametrize("option", [["--random"], ["--wide"], ["--repeats", "3"]])
def test_what_is_measured_of_decoders_alone_is_refused_of_an_encoder(
    option: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(encoder, "publish_run", lambda *_, **__: pytest.fail("it was measured"))
    monkeypatch.setattr("sys.argv", ["bench", "latency", "--model", "minilm", *option])
    with pytest.raises(SystemExit):
        main()
    assert f"got {option[0]}" in capsys.readouterr().err


def recipe_of_short_context(folder: Path) -> Recipe:
    """A small recipe on the tiny base, which is made for CONTEXT tokens here."""
    shutil.copytree(MODELS / "tiny", folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    return small_recipe().model_copy(update={"base": str(folder), "context_tokens": CONTEXT})


@pytest.mark.slow
def test_a_grid_is_measured_on_the_real_engine_with_as_many_adapters_as_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(latency_grid, "LENGTHS", (100,))  # longer ones have an engine of their own
    short = recipe_of_short_context(tmp_path / "base")
    grid = [Cell(100, 2, 2), Cell(CONTEXT + 100, 1, 1)]
    with random_adapters(short, short.adapter_methods, 1) as made:
        folders = {method: list(of_method.values()) for method, of_method in made.items()}
        report = latency.run(short, folders, grid, "inputs", is_random=True)
    report.save(tmp_path / "latency.json")
    report = LatencyReport.load(tmp_path / "latency.json")
    # An engine for each part of the grid
    printed = capsys.readouterr().out
    assert "with 4 adapters" in printed and "with 2 adapters" in printed
    assert report.engine["max_loras"] == "4, 2"
    base, lora, alora = (report.cell(100, 2, mode) for mode in ("base", "lora", "alora"))
    assert lora.cached_tokens == 0 < base.cached_tokens < alora.cached_tokens
    assert lora.computed_tokens - lora.cached_tokens > alora.computed_tokens
    assert 0 < alora.engine_ms <= alora.wall_ms.max and alora.repeats == 2
    assert CONTEXT < report.cell(CONTEXT + 100, 1, "alora").computed_tokens < CONTEXT + 200
    assert "beyond what the base was made for" in table(report)
