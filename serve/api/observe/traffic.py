"""Counts of what each version of a rule said, by the minute, for the last 24 hours; in memory.

Knows nothing of what was checked, and forgets all when the process ends.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from serve.api.observe.record import CheckRecord, JudgedVersion, StreamRecord

HOURS, QUARTER = 24, 15  # what is kept, and the minutes of which counts are told of together
MINUTES = HOURS * 60
IN_HOUR = 60 // QUARTER
OF_CALLERS = ("caller_gone", "request_refused", "too_long")  # failures that no rule has
LEAST_JUDGED = 20  # checks, before a share of them says something
JUMP_DEVIATIONS, JUMP_TIMES = 4.0, 1.5


class VersionCounts(NamedTuple):
    """How often a version was asked, flagged, had no verdict, and disagreed with its champion.
    It `would_block` what it flagged where whatever decided did not.
    """

    checks: int = 0
    flagged: int = 0
    unjudged: int = 0
    disagreed: int = 0
    would_block: int = 0

    @property
    def judged(self) -> int:
        return self.checks - self.unjudged

    def share(self, name: str) -> float | None:
        """`name` as a share of the checks with a verdict, unjudged of all; None of none."""
        total = self.checks if name == "unjudged" else self.judged
        part: int = getattr(self, name)
        return part / total if total else None


@dataclass(frozen=True, eq=False)
class Series:
    """Counts of one version: a row for each quarter of an hour of a day, the last one is now."""

    quarters: np.ndarray

    @classmethod
    def empty(cls) -> Series:
        return cls(np.zeros((HOURS * IN_HOUR, len(VersionCounts._fields)), dtype=np.uint32))

    def __add__(self, more: Series) -> Series:
        return Series(self.quarters + more.quarters)

    def counts(self, first: int = 0, end: int | None = None) -> VersionCounts:
        """Of the quarters from the first one on, before the end."""
        return VersionCounts(*self.quarters[first:end].sum(axis=0).tolist())

    @property
    def day(self) -> VersionCounts:
        return self.counts()

    @property
    def hour(self) -> VersionCounts:
        return self.counts(-IN_HOUR)

    @property
    def hours(self) -> list[VersionCounts]:
        """Of each hour, the last one now."""
        firsts = range(0, HOURS * IN_HOUR, IN_HOUR)
        return [self.counts(first, first + IN_HOUR) for first in firsts]

    @property
    def flagged(self) -> list[float | None]:
        """The flagged share of each hour."""
        return [counts.share("flagged") for counts in self.hours]

    def jump(self) -> tuple[float, float] | None:
        """The flagged share before the last hour and in it, if chance alone hardly explains that
        they differ; by the normal approximation of two shares.
        """
        before, now = self.counts(0, -IN_HOUR), self.hour
        was, share = before.share("flagged"), now.share("flagged")
        if was is None or share is None or min(before.judged, now.judged) < LEAST_JUDGED:
            return None
        pooled = (before.flagged + now.flagged) / (before.judged + now.judged)
        deviation = math.sqrt(pooled * (1 - pooled) * (1 / before.judged + 1 / now.judged))
        low, high = sorted((was, share))
        if high - low > JUMP_DEVIATIONS * deviation and high > JUMP_TIMES * low:
            return was, share
        return None


Counted = Mapping[tuple[str, str], Series]  # by rule and version
ALL = ("", "")  # the whole checks


class Traffic:
    """VersionCounts the checks that are answers; an Observer. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._minute = int(clock() // 60)
        self._minutes: dict[tuple[str, str], np.ndarray] = {}  # a ring of counts each

    def checked(self, record: CheckRecord) -> None:
        if record.purpose != "answer" or record.failure in OF_CALLERS:
            return
        self._advance()
        self._add(*ALL, VersionCounts(checks=1, unjudged=record.check is None))
        if record.check is None:
            for rule, card in record.cards.items():
                self._add(rule, card.version, VersionCounts(checks=1, unjudged=1))
            return
        on_trial = {said.rule for said in record.said}
        elsewhere = on_trial | record.policies.keys()  # of which there are no versions
        for verdict in record.check.verdicts:
            if verdict.rule not in elsewhere:
                version = record.version_of(verdict.rule)
                self._add(verdict.rule, version, VersionCounts(checks=1, flagged=verdict.violates))
        for rule in record.check.refused.keys() - elsewhere:
            self._add(rule, record.version_of(rule), VersionCounts(checks=1, unjudged=1))
        for rule in on_trial:
            self._add_trial([said for said in record.said if said.rule == rule], record)

    def streamed(self, record: StreamRecord) -> None: ...

    def close(self) -> None: ...

    def counted(self) -> Counted:
        """What was counted until now."""
        self._advance()
        self._minutes = {name: ring for name, ring in self._minutes.items() if ring.any()}
        counted: dict[tuple[str, str], Series] = {}
        for name, ring in self._minutes.items():
            oldest_first = np.roll(ring, -(self._minute + 1) % MINUTES, axis=0)
            by_quarter = oldest_first.reshape(HOURS * IN_HOUR, QUARTER, -1)
            counted[name] = Series(by_quarter.sum(axis=1))
        return counted

    def _add_trial(self, versions: Sequence[JudgedVersion], record: CheckRecord) -> None:
        """Count what each version of one rule said."""
        is_flagged = any(said.decides and said.violates for said in versions)
        disagreeing = [said for said, champion in record.trials() if said.disagrees(champion)]
        for said in versions:
            counts = VersionCounts(
                checks=1,
                flagged=said.violates is True,
                unjudged=said.violates is None,
                disagreed=said in disagreeing,
                would_block=said.violates is True and not is_flagged,
            )
            version = said.version or record.version_of(said.rule)
            self._add(said.rule, version, counts)

    def _add(self, rule: str, version: str, counts: VersionCounts) -> None:
        name = (rule, version)
        if name not in self._minutes:
            self._minutes[name] = np.zeros((MINUTES, len(counts)), dtype=np.uint32)
        self._minutes[name][self._minute % MINUTES] += _row(counts)

    def _advance(self) -> None:
        """Empty the minutes that have passed since the last check."""
        now = int(self._clock() // 60)
        passed = np.arange(max(self._minute, now - MINUTES) + 1, now + 1) % MINUTES
        for ring in self._minutes.values() if len(passed) else ():
            ring[passed] = 0
        self._minute = max(self._minute, now)


@functools.cache  # of few that differ: made anew they would take most of the time
def _row(counts: VersionCounts) -> np.ndarray:
    return np.array(counts, dtype=np.uint32)


def added_up(several: Sequence[Counted]) -> Counted:
    """The counts of several processes together."""
    together: dict[tuple[str, str], Series] = {}
    for counted in several:
        for name, series in counted.items():
            together[name] = together.get(name, Series.empty()) + series
    return together
