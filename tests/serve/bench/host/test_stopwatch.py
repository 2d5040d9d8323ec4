"""Each moment counts for the innermost function that is watched, and functions come back."""

from __future__ import annotations

import time

import pytest

from serve.bench.host.stopwatch import Stopwatch

HERE = f"{__name__}:Work"


class Work:
    """Something to watch."""

    def outer(self) -> str:
        time.sleep(0.02)
        self.inner()
        return "done"

    def inner(self) -> None:
        time.sleep(0.5)

    def fail(self) -> None:
        raise RuntimeError("broken")


def test_nested_functions_count_once() -> None:
    stopwatch = Stopwatch()
    with stopwatch.watching({"a": [f"{HERE}.outer"], "b": [f"{HERE}.inner"]}):
        assert Work().outer() == "done"
    assert 0.02 <= stopwatch.seconds["a"] < 0.5
    assert stopwatch.seconds["b"] >= 0.5


def test_a_cause_is_the_sum_of_its_functions() -> None:
    stopwatch = Stopwatch()
    with stopwatch.watching({"all": [f"{HERE}.outer", f"{HERE}.inner"]}):
        Work().outer()
    assert stopwatch.seconds["all"] >= 0.52


def test_functions_are_as_before_also_after_an_error() -> None:
    before = dict(vars(Work))
    stopwatch = Stopwatch()
    with pytest.raises(RuntimeError), stopwatch.watching({"a": [f"{HERE}.fail"]}):
        assert vars(Work)["fail"] is not before["fail"]
        Work().fail()
    assert dict(vars(Work)) == before
    with pytest.raises(KeyError), stopwatch.watching({"a": [f"{HERE}.fail", f"{HERE}.nowhere"]}):
        pass
    assert dict(vars(Work)) == before
