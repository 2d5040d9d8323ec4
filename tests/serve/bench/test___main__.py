"""The benchmarks' command.

It lists them, answers --help at once, and names the nearest of an unknown one.
"""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from guard.errors import GuardError
from guard.home import ROOT
from serve.bench.__main__ import BENCHES, bench_named, listing, main
from serve.bench.command import Bench, parser_of


def test_the_list_names_every_benchmark_with_what_it_measures() -> None:
    for name, bench in BENCHES.items():
        line = next(line for line in listing().splitlines() if line.split()[:1] == [name])
        assert bench.summary in line and bench.duration in line


def test_every_benchmark_and_every_file_of_one_stands_where_it_is_looked_for() -> None:
    documented = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    for name in BENCHES:
        assert f"| `{name}` |" in documented
    rooms = {bench.module for bench in BENCHES.values()}
    for path in (ROOT / "serve" / "bench").rglob("*.py"):
        if "\ndef arguments(" in path.read_text(encoding="utf-8"):
            assert ".".join(path.relative_to(ROOT).with_suffix("").parts) in rooms


@pytest.mark.parametrize("options", [[], ["--help"]])
def test_without_a_name_the_command_lists(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", *options])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert not exit_info.value.code
    assert capsys.readouterr().out.strip() == listing()


def test_an_unknown_name_is_an_error_with_the_nearest_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(GuardError, match="Did you mean 'latency'"):
        bench_named("latencey")
    with pytest.raises(GuardError, match=r"There are latency, .*load.*calibrate"):
        bench_named("xyz")
    monkeypatch.setattr("sys.argv", ["bench", "encodre"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2 and "Did you mean 'encoder'" in capsys.readouterr().err


@pytest.mark.parametrize("name", BENCHES)
def test_every_benchmark_has_the_common_options_and_defaults(name: str) -> None:
    bench = BENCHES[name]
    arguments = parser_of(name, bench).parse_args([])
    assert arguments.runs == ROOT / "runs"
    assert getattr(arguments, "model", None) == ("tiny" if "model" in bench.takes else None)
    assert arguments.bench == name and callable(BENCHES[name].load().main)


@pytest.mark.parametrize("name", BENCHES)
def test_a_benchmark_understands_all_that_it_takes(name: str) -> None:
    bench = BENCHES[name]
    offers = ["model=tiny", "rule=medical_advice", "quick", "wide", "force"]
    words = bench.accepted([f"--offer={offer}" for offer in offers])
    assert len(words) == len(bench.takes)
    parser_of(name, bench).parse_args(words)


def test_a_busy_machine_is_told_and_the_commit_read_before_a_benchmark_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    toy = ModuleType("toy_bench")
    toy.arguments = lambda parser: None  # type: ignore[attr-defined]
    toy.main = lambda arguments: events.append(arguments.bench)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_bench", toy)
    monkeypatch.setitem(BENCHES, "toy", Bench("toy_bench", "a toy", "no time"))
    monkeypatch.setattr("serve.bench.__main__.warn_if_busy", events.append)
    monkeypatch.setattr("serve.bench.__main__.started_from", lambda: events.append("commit"))
    monkeypatch.setattr("sys.argv", ["bench", "toy"])
    main()
    assert events == ["the figures will be off", "commit", "toy"]


HELP = """
import sys
from serve.bench.__main__ import BENCHES, main
for name in BENCHES:
    sys.argv = ["bench", name, "--help"]
    try:
        main()
    except SystemExit as stop:
        assert stop.code == 0
heavy = {"torch", "vllm", "transformers", "peft"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_is_answered_before_anything_heavy_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--runs") >= len(BENCHES)
