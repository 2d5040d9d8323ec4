"""A report of made-up figures: every engine that gets the work, in both rounds. Tests only."""

from __future__ import annotations

from serve.bench.pressure.measure import ROUNDS
from serve.bench.pressure.report import PressureReport, PressureRow
from serve.bench.pressure.work import PressureWork
from serve.bench.report import Spread

WORK = PressureWork(conversations=8, tokens=400, rules=5, turn_tokens=100, few_slots=2)


def toy_report() -> PressureReport:
    rows: list[PressureRow] = []
    for name in ROUNDS:
        for engine in WORK.engines:
            row = PressureRow(
                round=name,
                slots=engine.slots,
                order=engine.order,
                demand=engine.demand,
                cache_tokens=round(3200 / engine.demand),
                verdicts_per_second=Spread.of([40.0 / engine.demand, 50.0 / engine.demand]),
                p50_ms=100.0,
                p95_ms=200.0,
                computed_tokens=1500,
                needed_tokens=1000,
                swap_ins=3,
                adapter_mib=0.5,
            )
            rows.append(row)
    return PressureReport(
        commit="abc1234",
        hardware="a processor",
        versions={},
        model="tiny",
        peak_memory_mib=1000.0,
        conversations=WORK.conversations,
        conversation_tokens=WORK.tokens,
        new_tokens=87,
        rules=WORK.rules,
        repeats=2,
        engine={},
        rows=tuple(rows),
    )
