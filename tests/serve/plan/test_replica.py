"""What a replica holds and how long checks wait, against queueing theory and arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest import MonkeyPatch

from guard.errors import GuardError
from guard.recipe import ServingMemory, load_recipe
from serve.engine.backends.arguments import GIB, engine_args
from serve.plan.calibration import check_work, load_calibration
from serve.plan.replica import Load, PlannedMethod, deploy
from tests.serve.plan.on_paper import CALIBRATION, calibration, linear, plan


def alora(**replaced: Any) -> PlannedMethod:
    return deploy(plan(**replaced), CALIBRATION)[0]


def traffic(**replaced: Any) -> dict[str, Any]:
    stated = {"rate": 20.0, "lengths": [97, 97], "rules_a_check": [1, 1], "rules": 1}
    return stated | replaced


def test_memory_is_split_as_the_engine_splits_it() -> None:
    recipe, planned = load_recipe("tiny"), alora(slots=7)
    targets = recipe.settings("alora").lora["target_modules"]
    args = engine_args(recipe, [], {"max_loras": 7, "lora_target_modules": targets})
    assert planned.slots == args["max_loras"]
    assert planned.cache_tokens == args["kv_cache_memory_bytes"] // planned.bytes_of.token
    assert planned.step["max_num_batched_tokens"] == args["max_num_batched_tokens"]


def test_the_memory_that_is_stated_holds_the_weights_too() -> None:
    method = alora(memory_gib=2.0)
    bytes_of = method.bytes_of
    parts_bytes = bytes_of.weights + method.slots * bytes_of.adapter
    parts_bytes += method.cache_tokens * bytes_of.token
    assert 0 <= 2 * GIB - parts_bytes <= bytes_of.token


@pytest.mark.parametrize(
    ("replaced", "words"),
    [
        ({"memory_gib": 0.001}, "the base does not fit.*got 0.001 GiB"),
        ({"model": "qwen3-0.6b"}, "calibration is of another model.*got tiny"),
        ({"model": "minilm"}, "only decoders"),
        ({"slots": 10**9}, "does not hold"),
    ],
)
def test_what_does_not_go_together_is_refused(replaced: dict[str, object], words: str) -> None:
    with pytest.raises(GuardError, match=words):
        deploy(plan(**replaced), CALIBRATION)


def test_a_calibration_without_one_of_the_methods_is_refused() -> None:
    only = CALIBRATION.model_copy(update={"methods": {"alora": linear(tokens=1.0)}})
    with pytest.raises(GuardError, match="of other methods"):
        deploy(plan(), only)


def test_without_a_figure_of_memory_nothing_is_guessed(monkeypatch: MonkeyPatch) -> None:
    recipe = load_recipe("tiny").model_copy(update={"serving_memory": ServingMemory()})
    monkeypatch.setattr("serve.plan.replica.load_recipe", lambda name: recipe)
    with pytest.raises(GuardError, match="`memory_gib`"):
        deploy(plan(), CALIBRATION)


def test_the_calibration_is_read_as_it_was_written_and_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    with pytest.raises(GuardError, match=r"calibration.json.*make bench NAME=calibrate"):
        load_calibration(path)
    path.write_text(CALIBRATION.model_dump_json(), encoding="utf-8")
    assert load_calibration(path) == CALIBRATION
    for broken in ("{", '{"commit": 1}'):
        path.write_text(broken, encoding="utf-8")
        with pytest.raises(GuardError, match=r"calibration\.json"):
            load_calibration(path)


def test_aloras_compute_the_conversation_once_and_loras_once_a_rule() -> None:
    kinds = np.array([40.0]), np.array([8.0]), np.array([3.0])
    tokens, pairs = check_work(*kinds, 5, shares=True)
    assert tokens == 32 + 3 * 5
    # 32 tokens attend to those before them, the 5 of each rule to 40 and to those of its own.
    assert pairs == pytest.approx((40**2 - 8**2) / 2 + 3 * (5 * 40 + 5 * 5 / 2))
    tokens, pairs = check_work(*kinds, 5, shares=False)
    assert tokens == 3 * (32 + 5) and pairs == 3 * (45**2 - 8**2) / 2


def load(service_ms: list[float], used: float) -> Load:
    """One check at a time, of these times: the classical queue."""
    full_ms = np.array(service_ms)
    rate = 1000 * used / full_ms.mean()
    return Load(rate, 0.0, 0.0, full_ms, full_ms, step_ms=0.0, hit_rate=0.0)


@pytest.mark.parametrize("used", [0.3, 0.8])
def test_latencies_are_those_of_queueing_theory(used: float) -> None:
    quantiles = (np.arange(2000) + 0.5) / 2000
    exponential = load(list(-10 * np.log(1 - quantiles)), used)
    assert exponential.utilisation == pytest.approx(used)
    # Latencies of M/M/1 are exponential.
    for share in (0.95, 0.99):
        expected_ms = -np.log(1 - share) * 10 / (1 - used)
        assert exponential.latency_ms(share) == pytest.approx(expected_ms, rel=0.03)


def test_a_lone_check_pays_whole_steps_and_the_engine_s_waking() -> None:
    stepped = calibration(linear(steps=10.0, tokens=1.0).model_copy(update={"wake_ms": 3.0}))
    method = deploy(plan(traffic=traffic(lengths=[4093, 4093])), stepped)[0]
    lone = method.at(1e-6)
    assert lone.latency_ms(0.5) == pytest.approx(4096 + 2 * 10 + 3)
    assert lone.step_ms == pytest.approx(2048 + 10)
    short = deploy(plan(), stepped)[0]
    # A queue of checks of 100 tokens shares a step's 10 ms among 20.48.
    assert short.saturation == pytest.approx(1000 / (100 + 10 / 20.48))


def test_more_checks_wait_longer_and_a_tighter_target_takes_fewer() -> None:
    loose, tight, impossible = (alora(p95_ms=p95_ms) for p95_ms in (2000.0, 250.0, 90.0))
    assert loose.saturation == pytest.approx(10.0, rel=0.01)  # 100 ms a check
    waits = [loose.at(rate).latency_ms(0.95) for rate in (0.5, 4.0, 8.0)]
    assert waits == sorted(waits) and waits[0] == pytest.approx(100, rel=0.01)
    assert loose.greatest_rate == pytest.approx(0.85 * loose.saturation)
    assert tight.greatest_rate is not None and tight.greatest_rate < loose.greatest_rate
    assert tight.at(tight.greatest_rate).latency_ms(0.95) == pytest.approx(250)
    assert impossible.greatest_rate is None  # a lone check takes longer
    by_p99 = alora(p95_ms=2000.0, p99_ms=250.0)
    assert by_p99.greatest_rate is not None and by_p99.greatest_rate < tight.greatest_rate


GROWN = traffic(lengths=[960, 960], turns=6.0)


def test_the_more_conversations_wait_for_a_turn_the_less_of_each_is_cached() -> None:
    method = alora(traffic=GROWN)
    assert method.at(0.1).hit_rate == pytest.approx(sum(range(6)) / sum(range(7)), abs=0.03)
    small = replace(method, cache_tokens=10_000)
    assert small.at(0.1).hit_rate > 3 * small.at(10.0).hit_rate > 0
    assert small.saturation < 0.7 * method.saturation


@pytest.mark.parametrize(("zipf", "least", "most"), [(0.0, 8.0, 8.0), (1.0, 3.0, 6.0)])
def test_rules_without_a_slot_are_copied_the_popular_less(
    zipf: float, least: float, most: float
) -> None:
    asked = traffic(rules_a_check=[10, 10], rules=100, zipf=zipf)
    assert least <= alora(traffic=asked, slots=20).swap_ins <= most + 1e-9
    assert alora(traffic=asked, slots=100).swap_ins == 0
    every_rule = traffic(rules_a_check=[100, 100], rules=100, zipf=zipf)
    assert alora(traffic=every_rule, slots=20).swap_ins == pytest.approx(80)


def test_ten_thousand_rules_and_a_thousand_checks_a_second_are_planned() -> None:
    asked = traffic(rate=1000.0, rules_a_check=[50, 200], rules=10_000, lengths=[87, 289, 740])
    method = alora(traffic=asked, p95_ms=5000.0)
    assert method.slots < 10_000 and method.swap_ins > 0
    assert method.greatest_rate is not None and 0 < method.greatest_rate < 10
