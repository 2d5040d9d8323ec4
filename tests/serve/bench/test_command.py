"""What all benchmarks' command lines have in common."""

from __future__ import annotations

import argparse

import pytest

from serve.bench.__main__ import BENCHES
from serve.bench.command import Bench, add_count, add_option, add_parts, parser_of


def test_counts_are_whole_numbers_of_at_least_one(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_count(parser, "--repeats", 5, "runs")
    assert parser.parse_args([]).repeats == 5
    for text in ("0", "-1", "two"):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--repeats={text}"])
        assert "a whole number from 1" in capsys.readouterr().err


def test_parts_are_all_of_them_or_those_that_are_named_and_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    add_parts(parser, ("overhead", "load"))
    assert parser.parse_args([]).parts == ["overhead", "load"]
    assert parser.parse_args(["--parts=load"]).parts == ["load"]
    for text in ("laod", "overhead,laod", ""):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--parts={text}"])
        said = capsys.readouterr().err
        assert "no such part" in said and "Known: overhead, load" in said


def test_a_benchmark_of_parts_refuses_one_that_it_does_not_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parser_of("http", BENCHES["http"]).parse_args(["--parts=laod"])
    assert "no such part" in capsys.readouterr().err


def test_of_what_is_offered_a_benchmark_accepts_what_it_takes_and_all_of_its_own_options() -> None:
    words = ["--offer=model=big", "--offer=rule=a,b", "--offer=quick", "--repeats", "2"]
    plain = Bench("module", "summary", "duration")
    assert plain.accepted(words) == ["--model=big", "--repeats", "2"]
    ruled = Bench("module", "summary", "duration", takes=("rule", "quick"))
    assert ruled.accepted(words) == ["--rule=a,b", "--quick", "--repeats", "2"]
    assert ruled.accepted(["--rules=3"]) == ["--rules=3"]


def test_help_states_the_default() -> None:
    parser = argparse.ArgumentParser()
    add_option(parser, "--model", "tiny", "a base model")
    assert "a base model (default: tiny)" in parser.format_help()
