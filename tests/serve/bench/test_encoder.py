"""The encoder's benchmark: its cells, how much each method reads, and the crossover."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from pytest import CaptureFixture, MonkeyPatch

from guard.errors import GuardError
from guard.layout import Runs
from guard.recipe import load_recipe
from serve.bench import encoder
from serve.bench.encoder import LARGEST_CELL, EncoderBench, EncoderCell, crossover
from serve.bench.engines import judged
from serve.bench.report import GridReport
from serve.engine import Check, Refusal
from tests.serve.bench.test_report import rows_of
from tests.serve.bench.toy_bench import bench_on
from tests.serve.encoder_rules import recipe, save_encoder_head, save_encoder_rule


@pytest.mark.slow
def test_frozen_heads_read_a_conversation_once_and_adapters_once_each(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    rule = save_encoder_rule(runs.adapter("minilm", "toy", "lora"), seed=1)
    save_encoder_head(runs.adapter("minilm", "toy", "head"), seed=1)
    eager = recipe().model_copy(update={"engine": recipe().engine | {"enforce_eager": True}})
    bench: EncoderBench = bench_on("encoder", tmp_path, "--beside", "none", recipe=eager)
    inputs = bench.inputs()
    bench.cells = lambda: [  # type: ignore[method-assign]
        EncoderCell(tokens=80, rules=rules, line=f"{method} on minilm", repeats=2)
        for rules in (1, 3)
        for method in ("lora", "head")
    ]
    bench.main()
    report = GridReport.load(tmp_path / "encoder_bench.json")
    computed = {
        (row.cell["line"], row.cell["rules"]): row.median("computed_tokens") for row in report.rows
    }
    one = computed["lora on minilm", 1]
    assert computed["lora on minilm", 3] == 3 * one > 0
    assert computed["head on minilm", 3] == computed["head on minilm", 1] == one
    assert {row.median("forward_passes") for row in report.rows} == {1}  # three adapters in a batch
    assert all(row.measured["wall_ms"].min > 0 for row in report.rows)
    save_encoder_rule(rule, seed=2)
    assert bench.inputs() != inputs


def test_a_rule_that_is_refused_stops_the_benchmark() -> None:
    whole = Check((), {}, cached_tokens=0, computed_tokens=10, wall_ms=1.0)
    assert judged(whole, "here") is whole
    refused = {"rule": Refusal("rule", "no", "nan")}
    with pytest.raises(GuardError, match=r"here: a benchmark request was refused \(got rule: no"):
        judged(Check((), refused, 0, 10, 1.0), "here")


def test_every_trained_method_of_both_bases_is_measured_where_it_does_not_read_too_much(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    untrained: list[tuple[str, str]] = []

    def trained(_: object, model: str, method: str) -> dict[str, Path]:
        if (model, method) in untrained:
            raise GuardError(f"no rule is trained by {method}")
        return {"rule": tmp_path}

    def lines_of(*words: str) -> list[str]:
        return bench_on("encoder", tmp_path, *words, recipe=recipe())._lines()

    monkeypatch.setattr(encoder, "trained", trained)
    assert lines_of() == ["lora on minilm", "head on minilm", "lora on tiny", "alora on tiny"]
    cells: list[EncoderCell] = bench_on("encoder", tmp_path, recipe=recipe()).cells()
    assert all(cell.work <= LARGEST_CELL for cell in cells)
    most = {cell.line for cell in cells if (cell.tokens, cell.rules) == (2000, 100)}
    assert most == {"head on minilm", "alora on tiny"}
    assert lines_of("--beside", "none") == ["lora on minilm", "head on minilm"]
    quick = bench_on("encoder", tmp_path, "--quick", recipe=recipe()).cells()
    assert {cell.repeats for cell in quick} == {2} and {cell.tokens for cell in quick} == {120, 450}
    untrained += [("minilm", "lora"), ("tiny", "lora")]
    assert lines_of() == ["head on minilm", "alora on tiny"]
    assert "left out: no rule is trained by lora" in capsys.readouterr().out
    of_heads = SimpleNamespace(rows=[SimpleNamespace(cell={"tokens": 120})], find=lambda **_: [])
    assert bench_on("encoder", tmp_path, recipe=recipe()).notes(of_heads) == []
    untrained.append(("tiny", "alora"))
    assert lines_of() == ["head on minilm"]
    with pytest.raises(GuardError, match="no rule is trained by lora"):
        lines_of("--beside", "tiny")
    untrained.append(("minilm", "head"))
    with pytest.raises(GuardError, match="no rule is trained by lora"):
        lines_of()


def test_a_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match=r"not an encoder.*make serve"):
        bench_on("encoder", tmp_path, recipe=load_recipe("tiny"))


def test_the_crossover_lies_where_the_lines_of_log_ms_over_log_rules_meet() -> None:
    def at(first: tuple[float, ...], second: tuple[float, ...]) -> float | None:
        # The toy's rows have medians that are one more than what they are made of.
        of_first = rows_of("a", *[wall_ms - 1 for wall_ms in first])
        return crossover(of_first, rows_of("b", *[wall_ms - 1 for wall_ms in second]))

    assert at((1, 10, 100), (10, 10, 10)) == pytest.approx(10, rel=0.01)
    assert at((1, 10, 100), (3.1623, 5, 5)) == pytest.approx(4.21, abs=0.01)
    assert at((5, 50, 500), (1, 2, 3)) == 1
    assert at((1, 2, 3), (9, 9, 9)) is None
