"""The benchmarks of latency, of a decoder and of an encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest import CaptureFixture, MonkeyPatch

from guard.errors import GuardError
from guard.layout import Runs
from serve.bench import encoder
from serve.bench.__main__ import main
from serve.bench.encoder import LARGEST_CELL, EncoderBench, EncoderCell
from serve.bench.engines import judged
from serve.bench.harness import Repeat
from serve.bench.latency import BASE, LOWER_BOUND, LatencyBench, LatencyCell, spread_length
from serve.engine import Check, Refusal
from serve.engine.score import EngineCounters, Score, ScoreRequest
from tests.serve.bench.small_engine import small_recipe
from tests.serve.bench.toy_bench import bench_on, reported
from tests.serve.cards import RULE_TEXTS
from tests.serve.encoder_rules import recipe, save_encoder_head, save_encoder_rule

BLOCK = 32
NAMES: dict[str, list[str]] = {"lora": ["plain", "plain again"], "alora": ["first", "second"]}
MODES = (BASE, *NAMES, LOWER_BOUND)


@pytest.mark.parametrize(("tokens", "repeats"), [(1000, 1), (1000, 5), (100, 2), (5000, 32)])
def test_lengths_are_spread_evenly_over_a_block(tokens: int, repeats: int) -> None:
    lengths = [spread_length(tokens, Repeat(n, repeats, 0), BLOCK) for n in range(repeats)]
    assert all(abs(length - tokens) <= BLOCK // 2 for length in lengths)
    assert abs(sum(length % BLOCK for length in lengths) / repeats - BLOCK / 2) <= 1
    assert len({length % BLOCK for length in lengths}) == repeats


class ToyEngine:
    """Answers at once; `cached`: tokens of each request that come from the cache, by mode."""

    def __init__(self, cached: Mapping[str, Sequence[int]], rule_text: str) -> None:
        names = [name for of_method in NAMES.values() for name in of_method]
        self.rules = {name: SimpleNamespace(rule_text=rule_text) for name in names}
        self.counters = EngineCounters()
        self.backend = SimpleNamespace(block_size=BLOCK)
        self.calls: list[Sequence[ScoreRequest]] = []
        self.forgotten = 0
        self._cached = cached

    def forget(self) -> None:
        self.forgotten += 1

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | Refusal]:
        self.calls.append(requests)
        self.counters += EngineCounters(step_s=0.001)
        modes = {name: method for method, names in NAMES.items() for name in names}
        cached = self._cached[modes.get(requests[0].adapter or "", BASE)]
        return [Score(0.0, tokens, 100, 1.0) for tokens, _ in zip(cached, requests, strict=False)]


CLEAN = {BASE: [0, 64], "lora": [0, 0], "alora": [0, 64]}


def toy_bench(
    cached: Mapping[str, Sequence[int]] = CLEAN, rule_text: str = RULE_TEXTS["plain"]
) -> tuple[ToyEngine, LatencyBench]:
    engine = ToyEngine(cached, rule_text)
    bench: LatencyBench = bench_on("latency", Path("runs"))
    bench.use(engine, NAMES)  # type: ignore[arg-type]
    return engine, bench


def measure_all(bench: LatencyBench) -> None:
    for mode in MODES:
        bench.measure(LatencyCell(tokens=100, rules=2, mode=mode), Repeat(0, 1, seed=3))


def test_every_mode_is_asked_the_same_questions_each_with_an_empty_cache() -> None:
    engine, bench = toy_bench()
    measure_all(bench)
    base, lora, alora, bound = engine.calls
    assert engine.forgotten == 4
    asked = [[request.adapter for request in call] for call in (base, lora, alora, bound)]
    assert asked == [[None, None], NAMES["lora"], NAMES["alora"], [None]]
    strip = [[request._replace(adapter=None) for request in call] for call in (base, lora, alora)]
    assert strip[0] == strip[1] == strip[2]
    assert len({request.rule_text for request in base}) == 2
    assert bound[0].messages != base[0].messages
    sample = bench.measure(LatencyCell(tokens=100, rules=2, mode=LOWER_BOUND), Repeat(0, 1, 3))
    # A toy's prompt has a hundred tokens, and its step takes a millisecond.
    assert sample["engine_ms"] == pytest.approx(sample["needed_tokens"] / 100)


def test_adapters_that_read_nothing_get_nothing_and_the_base_titles() -> None:
    engine, bench = toy_bench(rule_text="")
    measure_all(bench)
    base, lora, alora, bound = engine.calls
    assert [request.rule_text for request in (*lora, *alora)] == [""] * 4
    assert len({request.rule_text for request in base}) == 2
    assert all(request.rule_text for request in (*base, *bound))


@pytest.mark.parametrize("leak", [{BASE: [32, 64]}, {"lora": [0, 32]}, {"alora": [32, 64]}])
def test_leaks_and_refusals_stop_the_benchmark(leak: Mapping[str, Sequence[int]]) -> None:
    engine, bench = toy_bench(CLEAN | leak)
    with pytest.raises(GuardError, match="leaked"):
        measure_all(bench)
    engine.score = lambda requests: [Refusal("rule", "no", "nan") for _ in requests]  # type: ignore[method-assign]
    with pytest.raises(GuardError, match="refused"):
        measure_all(bench)


def test_an_encoder_has_its_own_benchmark(monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    measured: list[dict[str, Any]] = []
    monkeypatch.setattr(EncoderBench, "_trained", lambda *_: {})
    monkeypatch.setattr(EncoderBench, "main", lambda self: measured.append(vars(self.options)))
    for name in ("latency", "encoder"):
        words = ["--model", "minilm", "--runs", str(tmp_path), "--quick"]
        monkeypatch.setattr("sys.argv", ["bench", name, *words])
        main()
    of_latency, of_encoder = measured
    assert of_latency == of_encoder


def test_a_conversation_that_the_base_does_not_hold_is_left_out() -> None:
    short = small_recipe().model_copy(update={"context_tokens": 1300})
    cells = bench_on("latency", Path("runs"), recipe=short).cells()
    assert max(cell.tokens for cell in cells) == 1000


@pytest.mark.slow
def test_a_grid_is_measured_on_the_real_engine_with_as_many_adapters_as_rules(
    tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    bench = bench_on("latency", tmp_path)
    bench.cells = lambda: [LatencyCell(tokens=100, rules=2, mode=mode, repeats=2) for mode in MODES]
    bench.main()
    assert "with 4 adapters" in capsys.readouterr().out
    report = reported(tmp_path / "latency.json")
    row = {row.cell["mode"]: row for row in report.rows}
    cached = {mode: row[mode].median("cached_tokens") for mode in MODES}
    computed = {mode: row[mode].median("computed_tokens") for mode in MODES}
    assert cached["lora"] == 0 < cached[BASE] < cached["alora"]
    assert computed["lora"] - cached["lora"] > computed["alora"]
    assert abs(row[LOWER_BOUND].median("needed_tokens") - computed["alora"]) <= 1
    assert abs(computed[LOWER_BOUND] - computed["alora"]) <= 6
    for mode in MODES:
        assert 0 < row[mode].median("engine_ms") <= row[mode].measured["wall_ms"].max
        assert row[mode].repeats == 2 and row[mode].measured["swap_ins"].max == 0
    assert row["lora"].median("over_alora") > 0 and "over_alora" not in row["alora"].measured
    assert "The adapters have random weights." in " ".join(bench.notes(report))


@pytest.mark.slow
def test_frozen_heads_read_a_conversation_once_and_adapters_once_each(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    save_encoder_rule(runs.adapter("minilm", "toy", "lora"), seed=1)
    save_encoder_head(runs.adapter("minilm", "toy", "head"), seed=1)
    eager = recipe().model_copy(update={"engine": recipe().engine | {"enforce_eager": True}})
    bench: EncoderBench = bench_on("encoder", tmp_path, recipe=eager)
    bench.cells = lambda: [  # type: ignore[method-assign]
        EncoderCell(tokens=80, rules=rules, method=method, repeats=2)
        for rules in (1, 3)
        for method in ("lora", "head")
    ]
    bench.main()
    report = reported(tmp_path / "encoder_bench.json")
    computed = {
        (row.cell["method"], row.cell["rules"]): row.median("computed_tokens")
        for row in report.rows
    }
    one = computed["lora", 1]
    assert computed["lora", 3] == 3 * one > 0
    assert computed["head", 3] == computed["head", 1] == one
    assert {row.median("forward_passes") for row in report.rows} == {1}  # three adapters in a batch
    assert all(row.measured["wall_ms"].min > 0 for row in report.rows)


def test_a_rule_that_is_refused_stops_the_benchmark() -> None:
    whole = Check((), {}, cached_tokens=0, computed_tokens=10, wall_ms=1.0)
    assert judged(whole, "here") is whole
    refused = {"rule": Refusal("rule", "no", "nan")}
    with pytest.raises(GuardError, match=r"here: a benchmark request was refused \(got rule: no"):
        judged(Check((), refused, 0, 10, 1.0), "here")


def test_every_trained_method_is_measured_where_it_does_not_read_too_much(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    untrained: list[str] = []

    def trained(_: object, model: str, method: str) -> dict[str, Path]:
        if method in untrained:
            raise GuardError(f"no rule of {model} is trained by {method}")
        return {"rule": tmp_path}

    def cells_of(*words: str) -> list[EncoderCell]:
        cells: list[EncoderCell] = bench_on("encoder", tmp_path, *words, recipe=recipe()).cells()
        return cells

    monkeypatch.setattr(encoder, "trained", trained)
    cells = cells_of()
    assert {cell.method for cell in cells} == {"lora", "head"}
    assert all(cell.work <= LARGEST_CELL for cell in cells)
    most = {cell.method for cell in cells if (cell.tokens, cell.rules) == (2000, 100)}
    assert most == {"head"}
    quick = cells_of("--quick")
    assert {cell.repeats for cell in quick} == {2} and {cell.tokens for cell in quick} == {120, 450}
    untrained.append("lora")
    assert {cell.method for cell in cells_of()} == {"head"}
    assert "left out: no rule of minilm is trained by lora" in capsys.readouterr().out
    untrained.append("head")
    with pytest.raises(GuardError, match="no rule of minilm is trained by lora"):
        cells_of()
