"""The benchmarks' command: it lists them, and runs one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest import CaptureFixture, MonkeyPatch

from guard.errors import GuardError
from guard.home import ROOT
from serve.bench.__main__ import BENCHES, bench_named, listing, main, parser_of
from tests.serve.bench.toy_bench import ToyBench


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
    with pytest.raises(GuardError, match=r"There are latency, encoder, calibrate"):
        bench_named("xyz")
    monkeypatch.setattr("sys.argv", ["bench", "encodre"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2 and "Did you mean 'encoder'" in capsys.readouterr().err


def test_every_benchmark_takes_what_make_gives(capsys: CaptureFixture[str]) -> None:
    for name in BENCHES:
        parser = parser_of(bench_named(name))
        options = parser.parse_args(["--model=tiny", "--quick"])
        assert (options.runs, options.model, options.quick) == (ROOT / "runs", "tiny", True)
        assert parser.parse_args([]).quick is False
    for word in ("--rule=a", "--repeats=0", "--repeats=two"):
        with pytest.raises(SystemExit):
            parser_of(ToyBench).parse_args([word])
        assert word.partition("=")[0] in capsys.readouterr().err
    assert "(default: 2)" in parser_of(ToyBench).format_help()


def test_a_benchmark_looks_at_the_machine_and_the_commit_before_it_measures(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr("serve.bench.__main__.warn_if_busy", events.append)
    monkeypatch.setattr("serve.bench.__main__.started_from", lambda: events.append("commit"))
    monkeypatch.setattr(
        "serve.bench.latency.LatencyBench.main", lambda _: events.append("measured")
    )
    monkeypatch.setattr("sys.argv", ["bench", "latency", "--runs", str(tmp_path)])
    main()
    assert events == ["the figures will be off", "commit", "measured"]
