"""When a dead engine is started again: after growing pauses, a few times. Knows nothing of threads
or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

# Before each start in a row; after the last one the process has to be started again.
PAUSES_S = (0.0, 1.0, 5.0, 15.0, 30.0)
STABLE_S = 120.0  # an engine that has lived this long begins with the first pause again


@runtime_checkable
class Restartable(Protocol):
    """An engine that can be started again, and knows when it has to be."""

    def restart(self, on_load: Callable[[], None]) -> None:
        """Start another engine of the same rules; `on_load` is called before each try, and before
        each rule that is loaded by itself. Raises GuardError if it does not start.
        """

    def works(self) -> bool:
        """Whether anything is still answered after a batch has failed, with nothing in flight."""
        ...


class RestartAttempts:
    """How often a dead engine was started again, and when it may be once more."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._started: float | None = None  # by time.monotonic, while the engine lives

    def died(self) -> None:
        """Note that the engine is dead."""
        if self._started is None or time.monotonic() > self._started + STABLE_S:
            self._in_a_row = 0

    def next_pause_s(self) -> float | None:
        """How long to wait before the next start; None if there is to be none."""
        if self._in_a_row >= len(PAUSES_S):
            return None
        self._in_a_row += 1
        return PAUSES_S[self._in_a_row - 1]

    def started(self) -> None:
        """Note that the engine was started."""
        self._started = time.monotonic()
