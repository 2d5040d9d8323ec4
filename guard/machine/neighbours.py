"""How busy other processes keep this machine's cores. Knows nothing of what this process does."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

from guard.machine.cores import usable_cores

STAT = Path("/proc/stat")
SAMPLE_S = 0.3
MOST_BUSY = 0.5  # cores that others may use before a warning
IDLE_COLUMNS = (3, 4)  # in a core's line: idle, and waiting for a disk
TIME_COLUMNS = 8  # later columns are guests' time, which these include


class CpuTimes(NamedTuple):
    """Counters in seconds: the work of the cores that this process may use, the work of this
    process, and the clock.
    """

    cores_s: float
    own_s: float
    clock_s: float


def warn_if_busy(consequence: str) -> None:
    """Say on stderr, in a line that ends in `consequence`, if other processes use these cores.

    Takes SAMPLE_S seconds. Says nothing where the system does not tell.
    """
    before = _cpu_times()
    time.sleep(SAMPLE_S)
    after = _cpu_times()
    if before is None or after is None:
        return
    warning = busy_warning(busy_cores(before, after), len(usable_cores()), consequence)
    if warning:
        print(warning, file=sys.stderr, flush=True)


def busy_warning(busy: float, cores: int, consequence: str) -> str:
    """What to say of `busy` cores of `cores`; empty where that is no more than MOST_BUSY."""
    if busy <= MOST_BUSY:
        return ""
    return f"warning: other processes keep {busy:.1f} of {cores} cores busy: {consequence}"


def busy_cores(before: CpuTimes, after: CpuTimes) -> float:
    """How many cores other processes kept busy between two times."""
    cores_s = after.cores_s - before.cores_s
    own_s = after.own_s - before.own_s
    return max(0.0, cores_s - own_s) / (after.clock_s - before.clock_s)


def worked_s(stat: str, cores: set[int]) -> float:
    """Seconds that these cores have worked since the machine started, by the text of /proc/stat."""
    ticks = 0
    names = {f"cpu{core}" for core in cores}
    for line in stat.splitlines():
        name, _, counts = line.partition(" ")
        if name not in names:
            continue
        for column, count in enumerate(counts.split()[:TIME_COLUMNS]):
            if column not in IDLE_COLUMNS:
                ticks += int(count)
    return ticks / os.sysconf("SC_CLK_TCK")


def _cpu_times() -> CpuTimes | None:
    """The current CPU counters; None where there is no /proc/stat."""
    try:
        stat = STAT.read_text(encoding="utf-8")
    except OSError:
        return None
    return CpuTimes(worked_s(stat, usable_cores()), time.process_time(), time.monotonic())
