from __future__ import annotations

from pathlib import Path

from serve.plan.plot import draw
from tests.serve.bench.drawn import drawn, lines_of, points_of
from tests.serve.plan.test_report import report


def test_latency_and_cost_are_drawn_against_the_rate(tmp_path: Path) -> None:
    plan = report()
    first, second = plan.curve
    slower = second.model_copy(
        update={"p50_ms": 15.0, "p95_ms": 40.0, "usd_per_million_checks": 5.0}
    )
    figure = drawn(draw, plan.model_copy(update={"curve": (first, slower)}), tmp_path / "plan.png")
    latency, cost = figure.axes
    lines = lines_of(latency)
    assert list(lines) == ["aLoRA, p50", "aLoRA, p95", "p95 target"]
    assert points_of(lines["aLoRA, p50"]) == [(1.0, 10.0), (2.0, 15.0)]
    assert points_of(lines["aLoRA, p95"]) == [(1.0, 20.0), (2.0, 40.0)]
    assert set(lines["p95 target"].get_ydata()) == {100}
    costs = lines_of(cost)
    assert list(costs) == ["aLoRA", "a judge"]
    assert points_of(costs["aLoRA"]) == [(1.0, 9.0), (2.0, 5.0)]
    assert set(costs["a judge"].get_ydata()) == {85.4}
    assert cost.get_ylabel() == "USD for a million checks"


def test_every_method_has_lines_of_its_own(tmp_path: Path) -> None:
    plan = report()
    lora = tuple(
        point.model_copy(update={"method": "lora", "p50_ms": 30.0, "p95_ms": 60.0})
        for point in plan.curve
    )
    figure = drawn(
        draw, plan.model_copy(update={"curve": (*plan.curve, *lora)}), tmp_path / "p.png"
    )
    lines = lines_of(figure.axes[0])
    assert set(lines) == {"aLoRA, p50", "aLoRA, p95", "LoRA, p50", "LoRA, p95", "p95 target"}
    assert points_of(lines["LoRA, p95"]) == [(1.0, 60.0), (2.0, 60.0)]
    assert lines["LoRA, p95"].get_color() != lines["aLoRA, p95"].get_color()
