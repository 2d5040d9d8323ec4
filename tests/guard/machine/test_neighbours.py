"""What other processes keep busy, from what the system says of its cores."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from guard.machine import neighbours
from guard.machine.neighbours import CpuTimes, busy_cores, busy_warning, warn_if_busy, worked_s

# Columns: user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice; 100 a second.
STAT = """\
cpu  1700 100 300 9000 400 20 30 50 600 0
cpu0 700 100 200 4000 300 10 20 30 500 0
cpu1 1000 0 100 5000 100 10 10 20 100 0
intr 12345 0 0
cpufreq 9 9
"""


def test_a_core_works_while_it_neither_idles_nor_waits_for_a_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(neighbours.os, "sysconf", lambda _: 100)
    assert worked_s(STAT, {0}) == pytest.approx(10.6)
    assert worked_s(STAT, {0, 1}) == pytest.approx(10.6 + 11.4)
    assert worked_s(STAT, {1, 64}) == pytest.approx(11.4)
    assert worked_s("", {0}) == 0


def test_the_own_time_is_not_that_of_others() -> None:
    before = CpuTimes(cores_s=100, own_s=5, clock_s=50)
    assert busy_cores(before, CpuTimes(103, 5, 52)) == pytest.approx(1.5)
    assert busy_cores(before, CpuTimes(103, 7, 52)) == pytest.approx(0.5)
    assert busy_cores(before, CpuTimes(103, 9, 52)) == 0


def test_half_a_core_is_not_worth_a_word() -> None:
    assert busy_warning(0.5, 2, "it is slow") == ""
    assert busy_warning(0.96, 2, "it is slow") == (
        "warning: other processes keep 1.0 of 2 cores busy: it is slow"
    )


@pytest.mark.parametrize(("cores_s", "is_said"), [(100.3, False), (100.9, True)])
def test_a_busy_machine_is_one_line_on_stderr(
    cores_s: float,
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    samples = iter([CpuTimes(100, 5, 50), CpuTimes(cores_s, 5, 51)])
    monkeypatch.setattr(neighbours, "SAMPLE_S", 0.0)
    monkeypatch.setattr(neighbours, "_cpu_times", lambda: next(samples))
    monkeypatch.setattr(neighbours, "usable_cores", lambda: {0, 1})
    warn_if_busy("it is slow")
    out, error = capsys.readouterr()
    said = "warning: other processes keep 0.9 of 2 cores busy: it is slow\n"
    assert out == "" and error == (said if is_said else "")


def test_the_times_are_those_of_the_cores_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    stat.write_text(STAT)
    monkeypatch.setattr(neighbours, "STAT", stat)
    monkeypatch.setattr(neighbours, "usable_cores", lambda: {1})
    times = neighbours._cpu_times()
    assert times is not None and times.cores_s == worked_s(STAT, {1}) > 0
    assert 0 < times.own_s <= time.process_time()
    assert 0 < times.clock_s <= time.monotonic()


def test_nothing_is_said_where_the_system_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(neighbours, "STAT", tmp_path / "none")
    monkeypatch.setattr(neighbours, "SAMPLE_S", 0.0)
    warn_if_busy("it is slow")
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def busy_process() -> Iterator[None]:
    program = "import time\nprint(flush=True)\nwhile time.monotonic(): pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.kill()


@pytest.mark.skipif(not neighbours.STAT.is_file(), reason="needs /proc/stat")
def test_a_real_busy_process_is_counted_and_our_own_work_is_not(busy_process: None) -> None:
    before = neighbours._cpu_times()
    assert before is not None
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    after = neighbours._cpu_times()
    assert after is not None
    assert after.own_s - before.own_s >= 0.3
    assert after.cores_s - before.cores_s > 0.4  # both of them, however others share the cores
    assert busy_cores(before, after) > 0.1
