"""A race with made-up times. Tests only."""

from __future__ import annotations

from serve.bench.race.report import Lane, RaceReport

RULES = 100


def toy_race(lora_s: float = 12.0, alora_s: float = 0.2) -> RaceReport:
    """LoRA's verdicts come two at a time, aLoRA's all at once."""
    pairs = RULES // 2
    steps = tuple(lora_s * (1 + number // 2) / pairs for number in range(RULES))
    violations = tuple(number % 5 == 0 for number in range(RULES))
    lanes = (
        Lane(method="lora", verdict_s=steps, violations=violations, computed_tokens=100_000),
        Lane(
            method="alora",
            verdict_s=(alora_s,) * RULES,
            violations=violations,
            computed_tokens=1300,
        ),
    )
    return RaceReport(
        commit="abc1234",
        hardware="two cores",
        versions={"vllm": "0.32.0"},
        model="tiny",
        peak_memory_mib=1.0,
        adapters="trained",
        conversation_tokens=1000,
        rules=RULES,
        engine={},
        lanes=lanes,
    )
