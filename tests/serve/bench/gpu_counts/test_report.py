"""The table adds up steps, and holds vLLM's programs against ours."""

from __future__ import annotations

from pathlib import Path

from serve.bench.gpu_counts.report import CountedCheck, CountedStep, GpuCountsReport, table


def step(tokens: int, programs: int) -> CountedStep:
    return CountedStep(
        tokens=tokens,
        requests=1,
        launches=288,
        programs=programs,
        programs_of_vllm=100 * programs,
        waits=2,
        waits_of_vllm=6,
    )


def test_before_are_vllms_programs_and_waits_and_after_ours(tmp_path: Path) -> None:
    check = CountedCheck(
        tokens=5000,
        rules=100,
        is_known=False,
        before=[step(2048, 10), step(2048, 20)],
        after=[step(5000, 30)],
    )
    report = GpuCountsReport(
        commit="c",
        hardware="h",
        versions={},
        model="qwen3-4b",
        peak_memory_mib=1.0,
        recipe_engine={},
        default_engine={},
        rule_turn="title",
        captured_tokens=512,
        checks=[check],
    )
    before, after = (line.split() for line in table(report).splitlines()[2:4])
    assert before == ["5,000", "x", "100", "new", "before", "2", "4,096", "576", "3,000", "12"]
    assert after == ["after", "1", "5,000", "288", "30", "2"]
    report.save(tmp_path / "gpu_counts_bench.json")
    assert GpuCountsReport.load(tmp_path / "gpu_counts_bench.json") == report
