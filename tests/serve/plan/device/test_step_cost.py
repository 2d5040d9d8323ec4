from __future__ import annotations

from serve.plan.device.step_cost import StepWork


def test_work_adds_up_field_by_field() -> None:
    total = StepWork(steps=1, tokens=10, pairs=2.5)
    total.add(StepWork(steps=2, tokens=5, pairs=1.5, sequences=3, swap_ins=1, loads=2, reads=7))
    assert total == StepWork(3, 15, 0, 4.0, 7, 3, 1, 2)
