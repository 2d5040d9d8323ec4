"""What the engine answered to a benchmark: scores, or an error. Knows nothing of clocks."""

from __future__ import annotations

from collections.abc import Iterable

from guard.errors import GuardError
from serve.engine import Call, Refusal, Score


def scores_of(outcomes: Iterable[Score | Refusal], where: str) -> list[Score]:
    """The outcomes, all of which are scores. Raises GuardError if one is a refusal."""
    scores = []
    for outcome in outcomes:
        if not isinstance(outcome, Score):
            problem, remedy = "a benchmark request was refused", "Run `make doctor`"
            raise GuardError(problem, where=where, got=outcome, remedy=remedy)
        scores.append(outcome)
    return scores


def scores_of_calls(calls: Iterable[Call], where: str) -> list[Score]:
    """The scores of all calls, which are done. Raises GuardError if a request was refused."""
    scores = []
    for call in calls:
        scores += scores_of(call.results(), where)
    return scores
