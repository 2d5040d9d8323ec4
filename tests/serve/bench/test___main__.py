"""The benchmarks' command: it lists them, and runs one of them or a file of one's own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pytest import CaptureFixture, MonkeyPatch

from guard.errors import GuardError
from guard.home import ROOT
from serve.bench.__main__ import BENCHES, bench_named, listing, main, parsed, parser_of
from tests.serve.bench.toy_bench import ToyBench

OFFERS = ["model=tiny", "quick", "wide", "force"]


def test_every_benchmark_is_listed_documented_and_in_the_table() -> None:
    documented = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    lines = {line.split()[0]: line for line in listing().splitlines() if line.strip()}
    for name in BENCHES:
        bench = bench_named(name)
        assert bench.name == name and f"| `{name}` |" in documented
        assert bench.summary in lines[name] and bench.duration in lines[name]
    for path in (ROOT / "serve" / "bench").glob("*.py"):
        if "(Benchmark[" in path.read_text(encoding="utf-8"):
            assert f"serve.bench.{path.stem}" in BENCHES.values()


def test_an_unknown_name_is_an_error_with_the_nearest_one(
    monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    with pytest.raises(GuardError, match="Did you mean 'latency'"):
        bench_named("latencey")
    with pytest.raises(GuardError, match=r"There are latency, .*load.*calibrate"):
        bench_named("xyz")
    monkeypatch.setattr("sys.argv", ["bench", "encodre"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2 and "Did you mean 'encoder'" in capsys.readouterr().err


def test_what_is_offered_may_be_unknown(capsys: CaptureFixture[str]) -> None:
    for name in BENCHES:
        bench = bench_named(name)
        options = parsed(bench, [f"--offer={offer}" for offer in OFFERS])
        assert (options.runs, options.model, options.quick) == (ROOT / "runs", "tiny", True)
        assert parsed(bench, []).quick is False
    words = ["--offer=model=big", "--offer=other=a,b", "--offer=wide", "--repeats", "2"]
    options = parsed(ToyBench, words)
    assert (options.model, options.repeats) == ("big", 2) and not hasattr(options, "rule")
    for word in ("--wide", "--rul=a", "--repeats=0", "--repeats=two"):
        with pytest.raises(SystemExit):
            parsed(ToyBench, [word])
        assert word.partition("=")[0] in capsys.readouterr().err
    assert "(default: 2)" in parser_of(ToyBench).format_help()


OWN = """
import contextlib
import time
from dataclasses import dataclass
from serve.bench.harness import Benchmark, Cell
from serve.bench.report import Column

@dataclass(frozen=True, kw_only=True)
class SleepCell(Cell):
    ms: int
    method: str

class Sleep(Benchmark[SleepCell]):
    name = "sleep"
    summary = "how long a sleep is"
    duration = "a moment"
    columns = Column("", "method"), Column("asked", "ms"), Column("took ms", "took_ms", 1, "spread")

    def cells(self):
        return [SleepCell(ms=ms, method="alora", repeats=self.options.repeats) for ms in (1, 2)]

    def started(self, cells):
        return contextlib.nullcontext()

    def measure(self, cell, repeat):
        started = time.perf_counter()
        time.sleep(cell.ms / 1000)
        return {"took_ms": 1000 * (time.perf_counter() - started)}
"""


def test_a_file_outside_the_checkout_is_a_benchmark(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    file = tmp_path / "my_bench.py"
    file.write_text(OWN)
    words = ["--offer=rule=a", "--runs", str(tmp_path / "runs"), "--repeats", "1"]
    monkeypatch.setattr("sys.argv", ["bench", str(file), *words])
    events: list[str] = []
    monkeypatch.setattr("serve.bench.__main__.warn_if_busy", events.append)
    monkeypatch.setattr("serve.bench.__main__.started_from", lambda: events.append("commit"))
    main()
    assert events == ["the figures will be off", "commit"]
    printed = capsys.readouterr().out
    assert "took ms" in printed and "aLoRA" in printed
    assert (tmp_path / "runs" / "sleep_bench.json").is_file()


def test_a_file_that_is_missing_or_has_not_one_benchmark_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="no such file"):
        bench_named(str(tmp_path / "gone.py"))
    (tmp_path / "none.py").write_text("import serve.bench.harness")
    with pytest.raises(GuardError, match=r"not one benchmark \(got 0 benchmarks\)"):
        bench_named(str(tmp_path / "none.py"))
    shutil.copy(ROOT / "serve/bench/fleet.py", tmp_path / "two.py")
    with pytest.raises(GuardError, match="got 2 benchmarks"):
        bench_named(str(tmp_path / "two.py"))
    shutil.copy(ROOT / "serve/bench/encoder.py", tmp_path / "shipped.py")
    with pytest.raises(GuardError, match=r"named as a shipped one.*got encoder\)"):
        bench_named(str(tmp_path / "shipped.py"))
    half = "from serve.bench.harness import Benchmark\nclass Half(Benchmark):\n    name = 'half'\n"
    (tmp_path / "half.py").write_text(half)
    with pytest.raises(GuardError, match=r"lacks a function \(got cells, measure, started\)"):
        bench_named(str(tmp_path / "half.py"))
