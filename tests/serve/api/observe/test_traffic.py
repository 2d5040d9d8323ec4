"""What is counted of each version, for how long, and when it has jumped."""

from __future__ import annotations

from dataclasses import replace

from guard.verdict import Verdict
from serve.api.observe.record import JudgedVersion
from serve.api.observe.traffic import ALL, Traffic, VersionCounts, added_up
from tests.serve.api.observe.toy_record import CARD, CHECK, record

FLAGGED, FINE = ("flagged", CARD.version), ("fine", CARD.version)
BROKEN = ("broken", CARD.version)
ALLOWED = replace(CHECK, verdicts=(Verdict("flagged", -1.0, 0.1, 0.5),))


class Clock:
    """Stands still until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_version_s_verdicts_are_counted_for_a_day() -> None:
    clock = Clock()
    traffic = Traffic(clock)
    traffic.checked(record())
    for failure in ("too_late", "caller_gone"):  # no rule is to blame for the second
        traffic.checked(record(failure=failure))
    traffic.checked(record(purpose="explanation"))
    counted = traffic.counted()
    assert counted[FLAGGED].day == VersionCounts(checks=2, flagged=1, unjudged=1)
    assert counted[FINE].hour == VersionCounts(checks=2, unjudged=1)
    assert counted[BROKEN].day.share("unjudged") == 1 and counted[ALL].day.checks == 2
    for hours, in_hour, in_day in ((1, 0, 2), (23.9, 0, 2), (24.5, 0, 0)):
        clock.now = 3600 * hours
        series = traffic.counted().get(FLAGGED)
        counts = (series.hour.checks, series.day.checks) if series else (0, 0)
        assert counts == (in_hour, in_day), hours
    traffic.checked(record())
    clock.now = 0.0  # it runs back
    traffic.checked(record())
    assert added_up([traffic.counted(), traffic.counted()])[FLAGGED].hour.checks == 4


def test_of_a_trial_what_decides_and_what_would_have_blocked_are_told_apart() -> None:
    def said(version: str, p: float | None, *, decides: bool) -> JudgedVersion:
        verdict = None if p is None else Verdict("flagged", 0.0, p, 0.5)
        is_trial = version == "trial"
        return JudgedVersion("flagged", version, is_trial, "shadow", decides, verdict)

    traffic = Traffic(Clock())
    for p_trial, p_champion in ((0.9, 0.1), (0.9, 0.9), (0.1, 0.9), (None, 0.1)):
        versions = said("trial", p_trial, decides=False), said("first", p_champion, decides=True)
        traffic.checked(record(check=CHECK, said=versions))
    trial, champion = (traffic.counted()["flagged", name].day for name in ("trial", "first"))
    assert trial == VersionCounts(checks=4, flagged=2, unjudged=1, disagreed=2, would_block=1)
    assert champion == VersionCounts(checks=4, flagged=2)
    assert FLAGGED not in traffic.counted()
    traffic.checked(record(said=(said("first", 0.9, decides=False),)))
    assert traffic.counted()["flagged", "first"].day.would_block == 1


def test_a_jump_is_what_chance_hardly_explains() -> None:
    def jump(flagged: int, allowed: int) -> tuple[float, float] | None:
        clock = Clock()
        traffic = Traffic(clock)
        for number in range(200):
            clock.now = 3600 * (1 + number // 10)
            traffic.checked(record(check=ALLOWED if number % 50 else CHECK))
        clock.now = 3600 * 23
        for check in [CHECK] * flagged + [ALLOWED] * allowed:
            traffic.checked(record(check=check))
        return traffic.counted()[FLAGGED].jump()

    assert jump(2, 60) is None and jump(10, 5) is None
    assert jump(15, 45) == (4 / 200, 0.25)
