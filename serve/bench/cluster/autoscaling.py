"""As many replicas as the load needs: how soon a second one answers when the load rises, what it
brings, and how soon it is gone again. Knows nothing of reports on disk.
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

FEW, MANY = 4, 40  # senders: fewer than the checks under way that a replica is to have, and more
STEADY_S = 20.0  # that each load is measured for
# Of that time: from a change until it is measured. Both together end before a second replica
# starts, which `ScalingPace.up_s` of more load bring.
SETTLING = 0.25
SECOND_S = 300.0  # that the second replica may take
LOOK_S = 0.1


def measure_autoscaling(
    client: httpx.Client,
    checks: Sequence[UndisturbedCheck],
    steady_s: float = STEADY_S,
    on_event: Callable[[], object] = lambda: None,
) -> Autoscaled:
    """A few senders all the time, and many more until two replicas have judged for a while.

    Raises GuardError if a second replica does not come, or comes while the first is measured, or
    does not go again.
    """
    settling_s = SETTLING * steady_s
    with under_load(client, checks, FEW) as outcomes:
        began_s = time.monotonic()
        time.sleep(steady_s)
        rose_s = time.monotonic()
        with under_load(client, checks, MANY - FEW) as more:
            time.sleep(settling_s + steady_s)
            _check_one_replica()
            second_s = _second_answers(outcomes, more) - rose_s
            on_event()
            time.sleep(settling_s + steady_s)
            fell_s = time.monotonic()
        on_event()
        wait_for_number(client, 1)
        down_s = time.monotonic() - fell_s
        on_event()
        time.sleep(settling_s)  # who loses checks by the end of a replica does so by now
    answers = [*outcomes.answers, *more.answers]
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
        judged=outcomes.judged + more.judged,
        unjudged=outcomes.unjudged + more.unjudged,
        lost=outcomes.lost + more.lost,
        false_allows=outcomes.false_allows + more.false_allows,
        contradicted=outcomes.contradicted + more.contradicted,
    )


def _check_one_replica() -> None:
    replicas = len(replica_processes())
    if replicas != 1:
        remedy = "Measure for less time: what one replica does alone is not known"
        raise GuardError("a second replica came too soon", got=replicas, remedy=remedy)


def _second_answers(*loads: LoadOutcomes) -> float:
    """When another replica than the first has judged, by this process's clock."""
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
    raise GuardError("no second replica has judged", got=f"{SECOND_S:g} s of load")


def _window(
    answers: Sequence[JudgedAnswer], since_s: float, until_s: float, senders: int, replicas: int
) -> LoadWindow:
    took_s = [answer.took_s for answer in answers if since_s <= answer.at_s < until_s]
    if not took_s:
        raise GuardError("no check was judged", got=f"{until_s - since_s:.1f} s of load")
    return LoadWindow(
        replicas=replicas,
        senders=senders,
        seconds=until_s - since_s,
        per_s=len(took_s) / (until_s - since_s),
        p50_ms=1000 * percentile(took_s, 50),
        p95_ms=1000 * percentile(took_s, 95),
    )
