"""The benchmark measures what it says: fresh conversations, an empty cache, the grid of the two sweeps, medians and their spread."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace

import pytest

from guard.errors import GuardError
from guard.example import Message
from guard.prompt import PromptBuilder
from serve.bench.latency.grid import (
    LORA_REPEATS,
    Bench,
    Cell,
    Repeat,
    Sample,
    by_engine,
    full_grid,
    further_rules,
    measure,
    quick_grid,
    spread,
    summarise,
)
from serve.bench.latency.report import MODES
from serve.bench.workload import conversation, wordings
from serve.engine.score import Refusal, Score, ScoreRequest
from tests.serve.guarded import RULE_TEXTS, guard_engine, prompts

BLOCK = 32
NAMES: dict[str, list[str]] = {
    "alora": ["medical_advice", "pii_leak"],
    "lora": ["plain", "plain again"],
}


@pytest.mark.parametrize("tokens", [60, 100, 250, 1000])
def test_a_conversation_has_the_length_that_was_asked_for(tokens: int) -> None:
    assert abs(len(prompts().prefix_ids(conversation(prompts(), tokens, seed=1))) - tokens) <= 5


def test_conversations_of_other_seeds_share_nothing_but_the_head() -> None:
    first, second = (prompts().prefix_ids(conversation(prompts(), 500, seed)) for seed in (1, 2))
    common = next(
        place
        for place, (left, right) in enumerate(zip(first, second, strict=False))
        if left != right
    )
    assert common < len(prompts().prefix_ids([])) + BLOCK


def test_a_length_no_conversation_can_have_is_an_error() -> None:
    with pytest.raises(GuardError, match="length"):
        conversation(prompts(), 20, seed=1)


def test_as_many_distinct_wordings_as_rules_each_of_a_rule_s_length() -> None:
    texts = list(RULE_TEXTS.values())
    found = wordings(texts, 100)
    assert len(set(found)) == 100 and found[: len(texts)] == texts
    assert {tuple(sorted(text.split())) for text in found} == {
        tuple(sorted(text.split())) for text in texts
    }
    assert wordings(texts, 2) == texts[:2]
    assert wordings([""], 3) == ["", "", ""]  # an adapter that is told nothing
    with pytest.raises(GuardError, match="too short for so many wordings"):
        wordings(["two words"], 3)


@pytest.mark.parametrize(("tokens", "repeats"), [(1000, 1), (1000, 5), (100, 2), (5000, 32)])
def test_what_is_beyond_whole_blocks_is_spread_evenly_over_the_repeats(
    tokens: int, repeats: int
) -> None:
    cell = Cell(tokens, 5, repeats)
    lengths = [spread(cell, number, BLOCK) for number in range(repeats)]
    assert all(abs(length - tokens) <= BLOCK // 2 for length in lengths)
    assert abs(sum(length % BLOCK for length in lengths) / repeats - BLOCK / 2) <= 1
    assert len({length % BLOCK for length in lengths}) == repeats


def test_the_full_grid_holds_both_sweeps_once() -> None:
    points = [(cell.prompt_tokens, cell.rules) for cell in full_grid(5)]
    assert {(length, 5) for length in (100, 250, 500, 1000, 2000, 5000)} <= set(points)
    assert {(length, rules) for length in (1000, 5000) for rules in (1, 5, 10, 20, 50, 100)} <= set(
        points
    )
    assert len(points) == len(set(points)) == 16
    assert {cell.repeats for cell in full_grid(20)} == {20} and {
        cell.lora_repeats for cell in full_grid(20)
    } == {LORA_REPEATS}


def test_what_is_beyond_the_sweeps_is_measured_when_asked_for_and_in_engines_of_its_own() -> None:
    beyond = set(full_grid(5, wide=True)) - set(full_grid(5))
    assert {(cell.prompt_tokens, cell.rules) for cell in beyond} == {
        (1000, 200),
        (1000, 500),
        (10_000, 5),
        (20_000, 5),
        (32_000, 5),
    }
    assert by_engine(full_grid(5)) == [full_grid(5)]
    parts = [
        {(cell.prompt_tokens, cell.rules) for cell in part}
        for part in by_engine(full_grid(5, wide=True))
    ]
    assert sorted(map(len, parts)) == [3, 18]  # every number of rules in one engine
    assert {(1000, 10), (1000, 500)} <= max(parts, key=len)


def test_the_quick_grid_ends_with_the_largest_cell_once_and_only_if_time_allows() -> None:
    *cells, last = quick_grid(5)
    assert (1000, 100) in {(cell.prompt_tokens, cell.rules) for cell in cells}
    assert not any(cell.optional for cell in cells)
    assert last == Cell(5000, 100, 1, optional=True)


class ToyEngine:
    """Answers at once; `cached` says how many tokens of each request come from the cache, by mode."""

    def __init__(
        self, cached: Mapping[str, Sequence[int]], rule_text: str = RULE_TEXTS["plain"]
    ) -> None:
        self.rules = {
            name: SimpleNamespace(rule_text=rule_text) for names in NAMES.values() for name in names
        }
        self.step_ms, self.swap_ins, self.block_size = 0.0, 0, BLOCK
        self.asked: list[Sequence[ScoreRequest]] = []
        self.forgotten = 0
        self._cached = cached

    def forget(self) -> None:
        self.forgotten += 1

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | Refusal]:
        self.asked.append(requests)
        self.step_ms += 1.0
        first = requests[0].adapter
        mode = "base" if first is None else "lora" if first in NAMES["lora"] else "alora"
        return [
            Score(0.0, cached, 100, 1.0)
            for cached, _ in zip(self._cached[mode], requests, strict=False)
        ]


CLEAN = {"base": [0, 64], "lora": [0, 0], "alora": [0, 64]}


def toy_bench(cached: Mapping[str, Sequence[int]] = CLEAN) -> tuple[ToyEngine, Bench]:
    engine = ToyEngine(cached)
    return engine, Bench(engine, prompts(), 2048, NAMES)  # type: ignore[arg-type]


def test_a_repeat_asks_every_mode_the_same_questions_each_with_an_empty_cache() -> None:
    engine, bench = toy_bench()
    bench.repeat(Cell(100, 2, 1), 0)
    base, lora, alora, limit = engine.asked
    assert engine.forgotten == 4
    assert [request.adapter for request in base] == [None, None]
    assert [[request.adapter for request in asked] for asked in (lora, alora)] == [
        NAMES["lora"],
        NAMES["alora"],
    ]
    strip = [
        [dataclasses.replace(request, adapter=None) for request in asked]
        for asked in (base, lora, alora)
    ]
    assert strip[0] == strip[1] == strip[2]
    assert len({request.rule_text for request in base}) == 2
    assert [request.adapter for request in limit] == [None]


def test_adapters_that_read_nothing_are_asked_with_nothing_and_the_base_with_titles() -> None:
    engine = ToyEngine(CLEAN, rule_text="")
    bench = Bench(engine, prompts(), 2048, NAMES)  # type: ignore[arg-type]
    bench.repeat(Cell(100, 2, 1), 0)
    base, lora, alora, limit = engine.asked
    assert [request.rule_text for request in (*lora, *alora)] == [""] * 4
    assert len({request.rule_text for request in base}) == 2
    assert all(request.rule_text for request in (*base, *limit))
    assert bench.suffix_tokens(2) == len(prompts().suffix_ids(""))


def test_repeats_have_fresh_conversations_and_begin_with_another_mode() -> None:
    engine, bench = toy_bench()
    for number in range(3):
        bench.repeat(Cell(100, 1, 3), number)
    firsts = [engine.asked[4 * number][0] for number in range(3)]
    assert len({request.messages for request in firsts}) == 3
    assert [request.adapter for request in firsts] == [None, "plain", "medical_advice"]


@pytest.mark.parametrize("leak", [{"base": [32, 64]}, {"lora": [0, 32]}, {"alora": [32, 64]}])
def test_a_prefix_cache_that_leaks_between_measurements_stops_the_benchmark(
    leak: Mapping[str, Sequence[int]],
) -> None:
    _, bench = toy_bench(CLEAN | leak)
    with pytest.raises(GuardError, match="leaked"):
        bench.repeat(Cell(100, 2, 1), 0)


def test_a_refused_request_stops_the_benchmark() -> None:
    engine, bench = toy_bench()
    engine.score = lambda requests: [Refusal("rule", "no") for _ in requests]  # type: ignore[method-assign]
    with pytest.raises(GuardError, match="refused"):
        bench.repeat(Cell(100, 2, 1), 0)


def test_the_limit_is_one_base_prompt_of_the_conversation_and_all_suffixes() -> None:
    engine, bench = toy_bench()
    repeat = bench.repeat(Cell(100, 2, 1), 0)
    (asked,) = engine.asked[-1]
    fan_out = [prompts().build(request.messages, request.rule_text) for request in engine.asked[2]]
    needed = fan_out[0].invocation_start + sum(
        len(prompt.token_ids) - prompt.invocation_start for prompt in fan_out
    )
    assert repeat.needed_tokens == needed
    assert abs(len(prompts().build(asked.messages, asked.rule_text).token_ids) - needed) <= 6


def sample(
    wall_ms: float, latencies_ms: Sequence[float] = (1.0, 2.0, 3.0), computed: int = 100
) -> Sample:
    return Sample(wall_ms, wall_ms / 2, tuple(latencies_ms), 10, computed, 0)


def repeat_of(base: float, lora: float, alora: float, limit: float) -> Repeat:
    return Repeat(
        {"base": sample(base), "lora": sample(lora), "alora": sample(alora)},
        100,
        limit,
        limit / 4,
        100,
    )


def test_a_cell_is_summed_up_by_medians_with_their_spread() -> None:
    repeats = [repeat_of(10, 100, 20, 8), repeat_of(11, 300, 30, 10), repeat_of(12, 200, 10, 12)]
    rows, ratio = summarise(Cell(1000, 5, 3), repeats, suffix_tokens=25)
    assert [row.mode for row in rows] == list(MODES)
    alora = rows[2]
    assert (alora.wall_ms, alora.wall_ms_min, alora.wall_ms_max, alora.engine_ms) == (
        20,
        10,
        30,
        10,
    )
    assert (alora.mean_ms, alora.p50_ms, alora.p95_ms) == (
        2.0,
        2.0,
        3.0,
    )  # of nine requests, not of three
    assert (ratio.lora_over_alora, ratio.lora_over_alora_min, ratio.lora_over_alora_max) == (
        10,
        5,
        20,
    )
    assert (ratio.limit_ms, ratio.limit_engine_ms) == (10, 2.5)
    assert ratio.alora_over_limit == 20 / 8  # of each repeat's own: 20 / 8, 30 / 10, 10 / 12
    ratios = (
        ratio.alora_engine_over_limit,
        ratio.alora_engine_over_limit_min,
        ratio.alora_engine_over_limit_max,
    )
    assert ratios == (10 / 2, 5 / 3, 15 / 2.5)
    assert alora.wall_ms_p95 == 29


def test_lora_is_measured_in_the_first_repeats_only() -> None:
    engine, bench = toy_bench()
    cell = Cell(100, 1, LORA_REPEATS + 2)
    repeats = [bench.repeat(cell, number) for number in range(cell.repeats)]
    assert [set(repeat.samples) for repeat in repeats] == [set(MODES)] * LORA_REPEATS + [
        {"base", "alora"}
    ] * 2
    firsts = [asked[0].adapter for asked in engine.asked[-6:]]
    assert {firsts[0], firsts[3]} == {
        None,
        NAMES["alora"][0],
    }  # begins with the one, then with the other
    rows, ratio = summarise(cell, repeats, suffix_tokens=25)
    assert [row.repeats for row in rows] == [cell.repeats, LORA_REPEATS, cell.repeats]
    assert ratio.lora_over_alora > 0


def test_what_a_rule_more_costs_is_the_median_over_pairs_with_its_interval() -> None:
    few = [repeat_of(1, 1, wall, 1) for wall in (100, 110, 90)]
    many = [repeat_of(1, 1, wall, 1) for wall in (150, 140, 190)]
    other = Cell(5000, 1, 3)
    first, second = further_rules(
        {Cell(1000, 30, 3): many, Cell(1000, 10, 3): few, Cell(1000, 40, 3): many, other: few}
    )
    assert (first.prompt_tokens, first.rules, first.up_to) == (1000, 10, 30)
    assert (first.ms, first.ms_low, first.ms_high) == (2.5, 1.5, 5.0)  # of 2.5, 1.5 and 5
    assert (second.rules, second.up_to, second.ms) == (30, 40, 0.0)


class ToyBench:
    """A bench on which LoRA takes a second a cell."""

    def repeat(self, cell: Cell, number: int, bar: object) -> Repeat:
        return repeat_of(1, 1000, 1, 1)


def test_an_optional_cell_that_would_take_too_long_is_left_out_and_named() -> None:
    grid = [Cell(100, 5, 2), Cell(5000, 100, 1, optional=True)]
    measured, left_out = measure(ToyBench(), grid, seconds=100)  # type: ignore[arg-type]
    assert list(measured) == grid[:1] and len(measured[grid[0]]) == 2
    assert "5000 tokens x 100 rules" in left_out[0]
    measured, left_out = measure(ToyBench(), grid, seconds=10_000)  # type: ignore[arg-type]
    assert list(measured) == grid and not left_out


@pytest.fixture(scope="module")
def real() -> Iterator[Bench]:
    """A bench on the shared engine, with a second LoRA for the time being."""
    engine = guard_engine()
    from tests.serve.guarded import adapter_folders

    engine.add("plain again", adapter_folders()["plain"])
    yield Bench(engine, prompts(), 2048, NAMES)
    engine.remove("plain again")


def test_on_the_real_engine_alora_computes_the_conversation_once_and_lora_as_often_as_there_are_rules(
    real: Bench,
) -> None:
    builder: PromptBuilder = prompts()
    repeat = real.repeat(Cell(300, 2, 1), 0)
    messages: tuple[Message, ...] = conversation(
        builder, spread(Cell(300, 2, 1), 0, BLOCK), seed=real._seed
    )
    prefix = len(builder.prefix_ids(messages))
    lengths = [len(builder.build(messages, text).token_ids) for text in real.texts]
    assert repeat.samples["lora"].cached_tokens == 0
    assert repeat.samples["lora"].computed_tokens == sum(lengths)
    assert repeat.samples["alora"].cached_tokens == prefix
    assert repeat.samples["alora"].computed_tokens == sum(lengths) - prefix
    assert all(0 < sample.engine_ms <= sample.wall_ms for sample in repeat.samples.values())
    assert abs(repeat.limit_tokens - repeat.samples["alora"].computed_tokens) <= 6
    assert 0 < repeat.limit_engine_ms <= repeat.limit_ms
