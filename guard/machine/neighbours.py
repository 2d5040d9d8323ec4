"""How busy other processes keep this machine's cores."""

from __future__ import annotations

import sys
import time

import psutil

from guard.machine.device import usable_cores

SAMPLE_S = 0.3
MOST_BUSY = 0.5  # cores that others may use before a warning


def warn_if_busy(consequence: str) -> None:
    """Say on stderr, in a line that ends in `consequence`, if other processes use these cores."""
    busy = busy_cores()
    if busy > MOST_BUSY:
        cores = len(usable_cores())
        print(
            f"warning: other processes keep {busy:.1f} of {cores} cores busy: {consequence}",
            file=sys.stderr,
            flush=True,
        )


def busy_cores() -> float:
    """How many of the cores that this process may use others keep busy; 0 if nobody tells."""
    own_s, began = time.process_time(), time.monotonic()
    try:
        percents = psutil.cpu_percent(interval=SAMPLE_S, percpu=True)
    except OSError:  # no /proc/stat
        return 0.0
    own_cores = (time.process_time() - own_s) / (time.monotonic() - began)
    usable = [percent for core, percent in enumerate(percents) if core in usable_cores()]
    return float(max(0.0, sum(usable) / 100 - own_cores))
