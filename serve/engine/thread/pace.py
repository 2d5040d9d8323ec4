"""How long a check takes beside others, learned from the last answers. Knows no engines."""

from __future__ import annotations

import time
from collections import deque

REMEMBERED = 64  # answers: a slow batch, such as the first, is soon forgotten
LEAST_ANSWERS = 8  # with fewer answers the pace is unknown
TOGETHER = 2  # checks in a batch from which the pace is learned: a lone check says nothing of many
FORGET_S = 10.0  # seconds without such a batch after which the pace is unknown


class Pace:
    """The seconds of work per answer, over the last REMEMBERED answers. Work that led to no answer
    counts too: what is thrown away keeps others waiting as well.
    """

    def __init__(self) -> None:
        self._learned_at = 0.0  # by time.monotonic
        self._work_s = 0.0  # since the last answer
        self._batches: deque[tuple[float, int]] = deque()  # seconds and answers
        self._seconds_an_answer = 0.0  # written by one thread, read by others

    def ran(self, busy_s: float, answers: int, checks: int) -> None:
        """Note that a batch of `checks` took `busy_s` seconds and gave `answers`."""
        if checks < TOGETHER:
            return
        now = time.monotonic()
        if now > self._learned_at + FORGET_S:
            self._work_s = self._seconds_an_answer = 0.0
            self._batches.clear()
        self._learned_at = now
        self._work_s += busy_s
        if answers > 0:
            self._batches.append((self._work_s, answers))
            self._work_s = 0.0
        remembered = sum(answers for _, answers in self._batches)
        while self._batches and remembered - self._batches[0][1] >= REMEMBERED:
            remembered -= self._batches.popleft()[1]
        if remembered >= LEAST_ANSWERS:
            work_s = self._work_s + sum(seconds for seconds, _ in self._batches)
            self._seconds_an_answer = work_s / remembered

    def seconds(self, checks: int) -> float:
        """The seconds that so many checks will take; 0 while nothing is known."""
        if time.monotonic() > self._learned_at + FORGET_S:
            return 0.0
        return checks * self._seconds_an_answer
