"""What other processes keep busy, from what the system says of its cores."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from guard.machine import neighbours
from guard.machine.neighbours import busy_cores, warn_if_busy


def busy(
    percents: list[float], own_s: float, cores: set[int], monkeypatch: pytest.MonkeyPatch
) -> float:
    """What others keep busy where this process works `own_s` of a second."""
    own, clock = iter([5.0, 5.0 + own_s]), iter([50.0, 51.0])
    monkeypatch.setattr(neighbours.psutil, "cpu_percent", lambda **_: percents)
    monkeypatch.setattr(neighbours, "usable_cores", lambda: cores)
    monkeypatch.setattr(neighbours.time, "process_time", lambda: next(own))
    monkeypatch.setattr(neighbours.time, "monotonic", lambda: next(clock))
    return busy_cores()


@pytest.mark.parametrize(
    ("own_s", "cores", "expected"),
    [(0.0, {0, 1}, 1.5), (1.0, {0, 1}, 0.5), (1.0, {1}, 0.0), (0.0, {1, 64}, 0.5)],
)
def test_neither_the_own_time_nor_other_cores_are_those_of_others(
    own_s: float, cores: set[int], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert busy([100.0, 50.0], own_s, cores, monkeypatch) == pytest.approx(expected)


@pytest.mark.parametrize(("cores", "is_said"), [(0.5, False), (0.96, True)])
def test_a_busy_machine_is_one_line_on_stderr(
    cores: float,
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(neighbours, "busy_cores", lambda: cores)
    monkeypatch.setattr(neighbours, "usable_cores", lambda: {0, 1})
    warn_if_busy("it is slow")
    said = "warning: other processes keep 1.0 of 2 cores busy: it is slow\n"
    assert capsys.readouterr() == ("", said if is_said else "")


def test_nothing_is_said_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def untold(**_: object) -> list[float]:
        raise FileNotFoundError("/proc/stat")

    monkeypatch.setattr(neighbours.psutil, "cpu_percent", untold)
    assert busy_cores() == 0.0


def test_a_real_busy_process_is_counted() -> None:
    program = "import time\nprint(flush=True)\nwhile time.monotonic(): pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        until = time.monotonic() + 30
        while busy_cores() <= 0.1:
            assert time.monotonic() < until
        process.kill()
