"""The meter measures what it says: fresh conversations, an empty cache, every mode alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import ClassVar

import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from serve.bench.latency.grid import LORA_REPEATS, Cell
from serve.bench.latency.measure import (
    LatencyMeter,
    LatencySample,
    LowerBound,
    Repeat,
    measure,
)
from serve.bench.latency.summary import cell_rows, ratio_row
from serve.bench.workload.prompts import conversation
from serve.engine.score import EngineCounters, Refusal, Score, ScoreRequest
from tests.serve.cards import RULE_TEXTS, prompts
from tests.serve.guarded import guard_engine

BLOCK = 32
MODES = ("base", "lora", "alora")
NAMES: dict[str, list[str]] = {
    "lora": ["plain", "plain again"],
    "alora": ["medical_advice", "pii_leak"],
}
MODE_OF: dict[str | None, str] = {
    "plain": "lora",
    "plain again": "lora",
    "medical_advice": "alora",
    "pii_leak": "alora",
}


class ToyEngine:
    """Answers at once; `cached`: tokens of each request that come from the cache, by mode."""

    def __init__(
        self, cached: Mapping[str, Sequence[int]], rule_text: str = RULE_TEXTS["plain"]
    ) -> None:
        self.rules = {
            name: SimpleNamespace(rule_text=rule_text) for names in NAMES.values() for name in names
        }
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
        first = requests[0].adapter
        mode = MODE_OF.get(first, "base")
        return [
            Score(0.0, cached, 100, 1.0)
            for cached, _ in zip(self._cached[mode], requests, strict=False)
        ]


CLEAN = {"base": [0, 64], "lora": [0, 0], "alora": [0, 64]}


def toy_meter(cached: Mapping[str, Sequence[int]] = CLEAN) -> tuple[ToyEngine, LatencyMeter]:
    engine = ToyEngine(cached)
    return engine, LatencyMeter(engine, prompts(), 2048, NAMES)  # type: ignore[arg-type]


def test_a_repeat_asks_every_mode_the_same_questions_each_with_an_empty_cache() -> None:
    engine, meter = toy_meter()
    meter.repeat(Cell(100, 2, 1), 0)
    base, lora, alora, bound = engine.calls
    assert engine.forgotten == 4
    assert [request.adapter for request in base] == [None, None]
    assert [[request.adapter for request in call] for call in (lora, alora)] == [
        NAMES["lora"],
        NAMES["alora"],
    ]
    strip = [[request._replace(adapter=None) for request in call] for call in (base, lora, alora)]
    assert strip[0] == strip[1] == strip[2]
    assert len({request.rule_text for request in base}) == 2
    assert [request.adapter for request in bound] == [None]


def test_adapters_that_read_nothing_get_nothing_and_the_base_with_titles() -> None:
    engine = ToyEngine(CLEAN, rule_text="")
    meter = LatencyMeter(engine, prompts(), 2048, NAMES)  # type: ignore[arg-type]
    meter.repeat(Cell(100, 2, 1), 0)
    base, lora, alora, bound = engine.calls
    assert [request.rule_text for request in (*lora, *alora)] == [""] * 4
    assert len({request.rule_text for request in base}) == 2
    assert all(request.rule_text for request in (*base, *bound))
    assert meter.suffix_tokens(2, "lora") == meter.suffix_tokens(2, "alora")
    assert meter.suffix_tokens(2, "alora") == len(prompts().suffix_ids(""))
    lengths = [len(prompts().suffix_ids(request.rule_text)) for request in base]
    assert meter.suffix_tokens(2, "base") == round(sum(lengths) / 2) > len(prompts().suffix_ids(""))


def test_repeats_have_fresh_conversations_and_begin_with_another_mode() -> None:
    engine, meter = toy_meter()
    for number in range(3):
        meter.repeat(Cell(100, 1, 3), number)
    firsts = [engine.calls[4 * number][0] for number in range(3)]
    assert len({request.messages for request in firsts}) == 3
    assert [request.adapter for request in firsts] == [None, "plain", "medical_advice"]


@pytest.mark.parametrize("leak", [{"base": [32, 64]}, {"lora": [0, 32]}, {"alora": [32, 64]}])
def test_a_prefix_cache_that_leaks_between_measurements_stops_the_benchmark(
    leak: Mapping[str, Sequence[int]],
) -> None:
    _, meter = toy_meter(CLEAN | leak)
    with pytest.raises(GuardError, match="leaked"):
        meter.repeat(Cell(100, 2, 1), 0)


def test_a_refused_request_stops_the_benchmark() -> None:
    engine, meter = toy_meter()
    engine.score = lambda requests: [Refusal("rule", "no", "nan") for _ in requests]  # type: ignore[method-assign]
    with pytest.raises(GuardError, match="refused"):
        meter.repeat(Cell(100, 2, 1), 0)


def test_the_lower_bound_is_one_base_prompt_of_the_conversation_and_all_suffixes() -> None:
    engine, meter = toy_meter()
    repeat = meter.repeat(Cell(100, 2, 1), 0)
    (request,) = engine.calls[-1]
    fan_out = [prompts().build(request.messages, request.rule_text) for request in engine.calls[2]]
    needed = fan_out[0].invocation_start + sum(
        len(prompt.token_ids) - prompt.invocation_start for prompt in fan_out
    )
    assert repeat.needed_tokens == needed
    assert abs(len(prompts().build(request.messages, request.rule_text).token_ids) - needed) <= 6


def test_lora_is_measured_in_the_first_repeats_only() -> None:
    engine, meter = toy_meter()
    cell = Cell(100, 1, LORA_REPEATS + 2)
    repeats = [meter.repeat(cell, number) for number in range(cell.repeats)]
    assert [set(repeat.samples) for repeat in repeats] == [set(MODES)] * LORA_REPEATS + [
        {"base", "alora"}
    ] * 2
    firsts = [call[0].adapter for call in engine.calls[-6:]]
    assert {firsts[0], firsts[3]} == {
        None,
        NAMES["alora"][0],
    }  # begins with the one, then with the other
    rows = cell_rows(cell, repeats, dict.fromkeys(MODES, 25))
    assert {row.mode: row.repeats for row in rows} == {
        "base": cell.repeats,
        "lora": LORA_REPEATS,
        "alora": cell.repeats,
    }
    assert ratio_row(cell, repeats).lora_over_alora is not None


class ToyMeter:
    """A meter on which LoRA takes a second a cell."""

    modes: ClassVar = ["base", "lora", "alora"]

    def repeat(self, cell: Cell, number: int, bar: object) -> Repeat:
        sample = LatencySample(1.0, 1.0, (1.0,), 0, 1, 0)
        lora = dataclasses.replace(sample, wall_ms=1000.0)
        samples = {"base": sample, "lora": lora, "alora": sample}
        return Repeat(samples, 100, LowerBound(1.0, 1.0, 100))


def test_an_optional_cell_that_would_take_too_long_is_left_out_and_named() -> None:
    grid = [Cell(100, 5, 2), Cell(5000, 100, 1, optional=True)]
    measured = measure(ToyMeter(), grid, seconds=100)  # type: ignore[arg-type]
    assert list(measured.repeats) == grid[:1] and len(measured.repeats[grid[0]]) == 2
    assert "5000 tokens x 100 rules" in measured.left_out[0]
    measured = measure(ToyMeter(), grid, seconds=10_000)  # type: ignore[arg-type]
    assert list(measured.repeats) == grid and not measured.left_out


@pytest.fixture(scope="module")
def real() -> Iterator[LatencyMeter]:
    """A meter on the shared engine, with a second LoRA for the time being."""
    engine = guard_engine()
    from tests.serve.guarded import adapter_folders

    engine.add("plain again", adapter_folders()["plain"])
    yield LatencyMeter(engine, prompts(), 2048, NAMES)
    engine.remove("plain again")


@pytest.mark.slow
def test_on_the_real_engine_alora_computes_the_conversation_once_and_lora_once_a_rule(
    real: LatencyMeter,
) -> None:
    builder: PromptBuilder = prompts()
    repeat = real.repeat(Cell(300, 2, 1), 0)
    messages: tuple[Message, ...] = conversation(
        builder, Cell(300, 2, 1).length(0, BLOCK), seed=real._seed
    )
    prefix = len(builder.prefix_ids(messages))
    lengths = [len(builder.build(messages, text).token_ids) for text in real.texts]
    assert repeat.samples["lora"].cached_tokens == 0
    assert repeat.samples["lora"].computed_tokens == sum(lengths)
    assert repeat.samples["alora"].cached_tokens == prefix
    assert repeat.samples["alora"].computed_tokens == sum(lengths) - prefix
    assert all(0 < sample.engine_ms <= sample.wall_ms for sample in repeat.samples.values())
    assert abs(repeat.lower_bound.measured_tokens - repeat.samples["alora"].computed_tokens) <= 6
    assert 0 < repeat.lower_bound.engine_ms <= repeat.lower_bound.wall_ms
