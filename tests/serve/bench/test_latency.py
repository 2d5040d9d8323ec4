"""The benchmarks of latency, of a decoder and of an encoder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest import CaptureFixture, MonkeyPatch

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.layout import Runs
from guard.recipe import MODELS, Recipe, load_recipe
from serve.bench import encoder, latency
from serve.bench.__main__ import main
from serve.bench.encoder import LARGEST_CELL, EncoderBench, EncoderCell
from serve.bench.engines import judged, memory_beside
from serve.bench.harness import Repeat
from serve.bench.latency import BASE, LOWER_BOUND, LatencyBench, LatencyCell, spread_length
from serve.bench.report import GridReport, table
from serve.engine import Check, Refusal
from serve.engine.score import EngineCounters, Score, ScoreRequest
from tests.serve.bench.small_engine import small_recipe
from tests.serve.bench.toy_bench import bench_on
from tests.serve.cards import RULE_TEXTS
from tests.serve.encoder_rules import recipe, save_encoder_head, save_encoder_rule

BLOCK = 32
CONTEXT = 1100  # tokens: as many as a warm-up needs
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
    assert of_latency == of_encoder and of_latency["beside"] is None
    bench = bench_on("latency", tmp_path, "--wide", recipe=load_recipe("minilm"))
    with pytest.raises(GuardError, match="got --wide"):  # which is of decoders alone
        bench.main()
    assert len(measured) == 2


def recipe_of_short_context(folder: Path) -> Recipe:
    """A small recipe on the tiny base, which is made for CONTEXT tokens here."""
    shutil.copytree(MODELS / "tiny", folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    return small_recipe().model_copy(update={"base": str(folder), "context_tokens": CONTEXT})


@pytest.mark.slow
def test_a_grid_is_measured_on_the_real_engine_with_as_many_adapters_as_rules(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.setattr(latency, "LENGTHS", (100,))  # longer ones have an engine of their own
    short = recipe_of_short_context(tmp_path / "base")
    bench = bench_on("latency", tmp_path, recipe=short)
    cells: list[LatencyCell] = []
    for tokens, rules, repeats in ((100, 2, 2), (CONTEXT + 100, 1, 1)):
        cells += [
            LatencyCell(tokens=tokens, rules=rules, mode=mode, repeats=repeats) for mode in MODES
        ]
    bench.cells = lambda: cells
    bench.main()
    printed = capsys.readouterr().out
    assert "with 4 adapters" in printed and "with 2 adapters" in printed  # an engine for each group
    report = GridReport.load(tmp_path / "latency.json")
    row = {mode: report.find(tokens=100, mode=mode)[0] for mode in MODES}
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
    (long,) = report.find(tokens=CONTEXT + 100, mode="alora")
    assert CONTEXT < long.median("computed_tokens") < CONTEXT + 200
    text = " ".join(table(report, bench.columns).split())
    assert "beyond what the base was made for" in text
    assert "The adapters have random weights." in " ".join(bench.notes(report))


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


def test_a_next_turn_is_of_a_conversation_that_all_rules_have_checked(
    monkeypatch: MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[int, Sequence[str]] | None] = []

    def check(messages: Sequence[Message], names: Sequence[str]) -> Check:
        calls.append((len(messages), names))
        return Check((), {}, cached_tokens=0, computed_tokens=len(calls), wall_ms=1.0)

    forget: Any = lambda: calls.append(None)  # noqa: E731
    recording: Any = SimpleNamespace(counters=EngineCounters(), forget=forget, check=check)
    monkeypatch.setattr(EncoderBench, "_trained", lambda *_: {})
    bench: EncoderBench = bench_on("encoder", tmp_path, "--beside", "none", recipe=recipe())
    bench._engines = {"tiny": recording}
    bench._names = {"alora on tiny": ["a", "b", "c"]}
    cell = EncoderCell(tokens=450, rules=2, line="alora on tiny, next turn", repeats=1)
    sample = bench.measure(cell, Repeat(0, 1, seed=0))
    forgotten, first, second = calls
    assert forgotten is None and first is not None and second is not None
    assert first[0] == second[0] - 2 > 0 and first[1] == second[1] == ["a", "b"]
    assert sample["computed_tokens"] == 3  # the second check's


def test_a_rule_that_is_refused_stops_the_benchmark() -> None:
    whole = Check((), {}, cached_tokens=0, computed_tokens=10, wall_ms=1.0)
    assert judged(whole, "here") is whole
    refused = {"rule": Refusal("rule", "no", "nan")}
    with pytest.raises(GuardError, match=r"here: a benchmark request was refused \(got rule: no"):
        judged(Check((), refused, 0, 10, 1.0), "here")


@pytest.mark.parametrize(("device", "wanted"), [("cuda", 0.92 / 2), ("cpu", None)])
def test_bases_side_by_side_have_equal_parts_of_a_gpu(
    device: str, wanted: float | None, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.bench.engines.installed_device", lambda: device)
    assert memory_beside(2).get("gpu_memory_utilization") == wanted


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
    of_alora = ["alora on tiny", "alora on tiny, next turn"]
    assert lines_of() == ["lora on minilm", "head on minilm", "lora on tiny", *of_alora]
    cells: list[EncoderCell] = bench_on("encoder", tmp_path, recipe=recipe()).cells()
    assert all(cell.work <= LARGEST_CELL for cell in cells)
    most = {cell.line for cell in cells if (cell.tokens, cell.rules) == (2000, 100)}
    assert most == {"head on minilm", *of_alora}
    assert lines_of("--beside", "none") == ["lora on minilm", "head on minilm"]
    quick = bench_on("encoder", tmp_path, "--quick", recipe=recipe()).cells()
    assert {cell.repeats for cell in quick} == {2} and {cell.tokens for cell in quick} == {120, 450}
    untrained += [("minilm", "lora"), ("tiny", "lora")]
    assert lines_of() == ["head on minilm", *of_alora]
    assert "left out: no rule is trained by lora" in capsys.readouterr().out
    untrained.append(("tiny", "alora"))
    assert lines_of() == ["head on minilm"]
    with pytest.raises(GuardError, match="no rule is trained by lora"):
        lines_of("--beside", "tiny")
