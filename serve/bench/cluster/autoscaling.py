"""As many replicas as the load needs: how soon a second one answers when the load rises, how much
more they answer together, and how soon it is gone again. Knows nothing of reports on disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import httpx

from guard.errors import GuardError
from serve.bench.cluster.load import JudgedAnswer, LoadOutcomes, UndisturbedCheck, under_load
from serve.bench.cluster.report import Autoscaled, LoadWindow
from serve.bench.cluster.servers import replica_processes, wait_for_number
from serve.bench.report import percentile

# Senders: fewer, and more, than the number of open checks that a replica is meant to have.
FEW, MANY = 4, 40
STEADY_S = 20.0  # how long each load is measured
# The share of STEADY_S to wait after a change before measuring. Waiting and measuring end before a
# second replica starts, which it does after `ScalingPace.up_s` of the larger load.
SETTLING = 0.25
SECOND_S = 300.0  # how long the second replica may take to answer
LOOK_S = 0.1  # between two looks at the answers


def measure_autoscaling(
    client: httpx.Client,
    checks: Sequence[UndisturbedCheck],
    steady_s: float = STEADY_S,
    on_event: Callable[[], object] = lambda: None,
) -> Autoscaled:
    """Let a few senders send all the time, and many more until two replicas have judged a while.

    Raises GuardError if a second replica does not come, or comes while the first is measured, or
    does not go again.
    """
    settling_s = SETTLING * steady_s
    with under_load(client, checks, FEW) as outcomes:
        began_s = time.monotonic()
        time.sleep(steady_s)
        rose_s = time.monotonic()
        with under_load(client, checks, MANY - FEW) as more_outcomes:
            time.sleep(settling_s + steady_s)
            _check_one_replica()
            second_s = _second_answers(outcomes, more_outcomes) - rose_s
            on_event()
            time.sleep(settling_s + steady_s)
            fell_s = time.monotonic()
        on_event()
        wait_for_number(client, 1)
        down_s = time.monotonic() - fell_s
        on_event()
        time.sleep(settling_s)  # checks that the ending replica loses are lost by now
    answers = [*outcomes.answers, *more_outcomes.answers]
    alone_s = rose_s + settling_s
    settled_s = rose_s + second_s + settling_s
    return Autoscaled(
        second_s=second_s,
        down_s=down_s,
        windows=(
            _window(answers, began_s, rose_s, FEW, 1),
            _window(answers, alone_s, alone_s + steady_s, MANY, 1),
            _window(answers, settled_s, fell_s, MANY, 2),
        ),
        judged=outcomes.judged + more_outcomes.judged,
        unjudged=outcomes.unjudged + more_outcomes.unjudged,
        lost=outcomes.lost + more_outcomes.lost,
        false_allows=outcomes.false_allows + more_outcomes.false_allows,
        contradicted=outcomes.contradicted + more_outcomes.contradicted,
    )


def _check_one_replica() -> None:
    replicas = len(replica_processes())
    if replicas != 1:
        remedy = "Measure for a shorter time: one replica has to be measured alone"
        raise GuardError("a second replica came too soon", got=replicas, remedy=remedy)


def _second_answers(*loads: LoadOutcomes) -> float:
    """The time at which a replica other than the first has judged, by this process's clock."""
    until = time.monotonic() + SECOND_S
    first: str | None = None
    seen = [0] * len(loads)
    while time.monotonic() < until:
        for number, load in enumerate(loads):
            new = load.answers[seen[number] :]
            seen[number] += len(new)
            for answer in new:
                first = first or answer.replica
                if answer.replica != first:
                    return answer.at_s
        time.sleep(LOOK_S)
    remedy = "Look at the server's log: a second replica should start"
    raise GuardError("no second replica has judged", got=f"{SECOND_S:g} s of load", remedy=remedy)


def _window(
    answers: Sequence[JudgedAnswer], since_s: float, until_s: float, senders: int, replicas: int
) -> LoadWindow:
    took_s = [answer.took_s for answer in answers if since_s <= answer.at_s < until_s]
    if not took_s:
        remedy = "Measure for a longer time, or look at the server's log"
        got = f"{until_s - since_s:.1f} s of load"
        raise GuardError("no check was judged", got=got, remedy=remedy)
    return LoadWindow(
        replicas=replicas,
        senders=senders,
        seconds=until_s - since_s,
        per_s=len(took_s) / (until_s - since_s),
        p50_ms=1000 * percentile(took_s, 50),
        p95_ms=1000 * percentile(took_s, 95),
    )
