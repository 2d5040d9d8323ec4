"""The roofline, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.recipe import load_recipe
from serve.plan.device.accelerator import DEVICES, ComputedCost, Device, load_device
from serve.plan.device.architecture import shape_of
from serve.plan.device.step_cost import StepWork

SHAPE = shape_of(load_recipe("tiny"))
ADAPTER = 1_000_000


def device(**replaced: object) -> Device:
    fields: dict[str, object] = {
        "name": "toy",
        "source": "none",
        "peak_tflops": 2.0,
        "memory_gb_s": 100.0,
        "memory_gib": 8.0,
        "compute_share": 0.5,
        "memory_share": 0.5,
        "host_step_ms": 3.0,
        "host_rule_ms": 0.5,
        "host_check_ms": 0.25,
        "host_token_us": 2.0,
        "host_source": "none",
        "host_to_device_gb_s": 10.0,
        "disk_gb_s": 1.0,
        "price_an_hour": 1.0,
        "price_source": "none",
    }
    return Device.model_validate(fields | replaced)


def test_many_tokens_are_bound_by_operations() -> None:
    cost = ComputedCost(device(), SHAPE, 2, ADAPTER)
    work = StepWork(steps=1, tokens=10_000, adapted=100, pairs=5e6, sequences=2)
    flops = 10_000 * SHAPE.token_flops() + 5e6 * SHAPE.pair_flops() + 100 * 2 * ADAPTER
    assert cost.compute_s(work) == pytest.approx(flops / 1e12)
    assert cost.compute_s(work) > cost.memory_s(work)
    assert cost.step_ms(work) == pytest.approx(1000 * flops / 1e12 + 3.0 + 2 * 0.5)


def test_few_tokens_are_bound_by_reading_weights_adapters_and_earlier_context() -> None:
    cost = ComputedCost(device(), SHAPE, 2, ADAPTER)
    work = StepWork(steps=1, tokens=3, sequences=3, reads=3000)
    numbers = SHAPE.weights + 3 * ADAPTER + 3000 * SHAPE.key_value_width
    assert cost.memory_s(work) == pytest.approx(2 * numbers / 50e9)
    assert cost.step_ms(work) == pytest.approx(1000 * 2 * numbers / 50e9 + 3.0 + 3 * 0.5)
    once = ComputedCost(device(reads_shared_once=True), SHAPE, 2, ADAPTER)
    assert once.memory_s(work) == pytest.approx(2 * (SHAPE.weights + 3 * ADAPTER) / 50e9)


def test_a_copy_and_a_read_take_the_adapters_bytes() -> None:
    cost = ComputedCost(device(), SHAPE, 2, ADAPTER)
    assert cost.swap_s(StepWork(swap_ins=5)) == pytest.approx(5 * 2e6 / 10e9)
    assert cost.swap_s(StepWork(loads=5)) == pytest.approx(5 * 2e6 / 1e9)
    assert cost.submit_ms(1000, 7) == pytest.approx(0.25 + 2.0)


@pytest.mark.parametrize("path", sorted(DEVICES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_device_loads_and_says_where_its_figures_are_from(path: Path) -> None:
    loaded = load_device(path.stem)
    assert loaded.source and loaded.host_source and loaded.price_source


def test_an_unknown_device_names_the_known_ones() -> None:
    with pytest.raises(GuardError, match="Did you mean 'h100'"):
        load_device("h10")
