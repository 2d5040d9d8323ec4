from __future__ import annotations

import os

from guard.machine.cores import usable_cores


def test_cores_are_those_that_the_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores() == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)
