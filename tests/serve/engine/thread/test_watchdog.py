"""What the watchdog calls late, and what it calls hanging."""

from __future__ import annotations

import pytest
from pytest import MonkeyPatch

from serve.engine.thread.watchdog import Watchdog


@pytest.fixture
def now(monkeypatch: MonkeyPatch) -> list[float]:
    """The clock, in seconds; to be moved."""
    clock = [1000.0]
    monkeypatch.setattr("serve.engine.thread.watchdog.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("serve.engine.thread.watchdog.HANGS_FOR_GOOD_S", 30.0)
    monkeypatch.setattr("serve.engine.thread.watchdog.LOADING_S", 900.0)
    return clock


def test_a_batch_is_late_after_a_check_s_time_and_hangs_after_more(now: list[float]) -> None:
    watchdog = Watchdog(timeout_s=60.0)
    with watchdog.batch():
        now[0] += 60.0
        assert (watchdog.batch_is_late, watchdog.hanging) == (False, None)
        now[0] += 1.0
        assert (watchdog.batch_is_late, watchdog.hanging) == (True, None)
        now[0] += 30.0
        assert watchdog.hanging == "a batch of the engine"
        assert not watchdog.loading_is_late
    assert (watchdog.batch_is_late, watchdog.hanging) == (False, None)


def test_what_is_loaded_has_longer_before_it_hangs(now: list[float]) -> None:
    watchdog = Watchdog(timeout_s=60.0)
    with watchdog.loading():
        now[0] += 61.0
        assert (watchdog.loading_is_late, watchdog.hanging) == (True, None)
        now[0] += 839.0
        assert watchdog.hanging is None
        now[0] += 1.0
        assert watchdog.hanging == "what the engine loads"
        assert not watchdog.batch_is_late
    assert (watchdog.loading_is_late, watchdog.hanging) == (False, None)


def test_what_is_loaded_next_has_a_time_of_its_own(now: list[float]) -> None:
    watchdog = Watchdog(timeout_s=60.0)
    with watchdog.loading():
        now[0] += 800.0
        watchdog.load_next()
        now[0] += 900.0
        assert watchdog.hanging is None
        now[0] += 1.0
        assert watchdog.hanging == "what the engine loads"
    assert watchdog.hanging is None


def test_what_fails_is_timed_no_more(now: list[float]) -> None:
    watchdog = Watchdog(timeout_s=60.0)
    for doing in (watchdog.batch, watchdog.loading):
        with pytest.raises(ZeroDivisionError), doing():
            raise ZeroDivisionError
    now[0] += 10_000.0
    assert not watchdog.batch_is_late and not watchdog.loading_is_late
    assert watchdog.hanging is None
