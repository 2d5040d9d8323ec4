"""Which turn carries a violation: the one at whose end the rule's logit rises most.

The whole conversation was computed just before, so each turn costs a suffix of each violated rule.
Leave-one-out names the turn as well (docs/results/quality.md), but computes all turns behind the
one that is left out again. Knows nothing of any format.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Request
from pydantic import BaseModel

from guard.conversation.example import Message
from guard.verdict import Verdict
from serve.api.service import CheckService, DecidedCheck, Question
from serve.policy.rule_set import RuleSet


class Explanation(BaseModel):
    """The turn, counted from 0, at whose end the rule's logit rises most, and the probabilities at
    the ends of the turn before, if that was judged, and of this one.
    """

    turn: int
    p_before: float | None
    p_after: float


async def explained(
    request: Request,
    messages: Sequence[Message],
    decided: DecidedCheck,
    cache_salt: str | None = None,
    *,
    tools: Sequence[Message] = (),
) -> dict[str, Explanation]:
    """The turn that carries each violation of the check of `tools` and `messages`.

    Raises as `CheckService.check`.
    """
    violated = [verdict.rule for verdict in decided.check.verdicts if verdict.violates]
    if not violated:
        return {}
    growing = [(*tools, *messages[:end]) for end in range(1, len(messages))]
    question = Question(RuleSet.any_of(violated), cache_salt=cache_salt, purpose="explanation")
    checks = await CheckService.of(request).check_each(request, growing, question)
    turns = [_by_rule(at_end) for at_end in (*checks.all(), decided)]
    carrying: dict[str, Explanation] = {}
    for rule in violated:
        carrying[rule] = _largest_rise([verdicts.get(rule) for verdicts in turns])
    return carrying


def _by_rule(decided: DecidedCheck) -> dict[str, Verdict]:
    return {verdict.rule: verdict for verdict in decided.check.verdicts}


def _largest_rise(verdicts: Sequence[Verdict | None]) -> Explanation:
    """The turn with the largest rise of one rule's logit, since the last turn with a verdict."""
    largest: tuple[float, Explanation] | None = None
    last_logit = 0.0
    p_before: float | None = None  # of the turn before
    for turn, verdict in enumerate(verdicts):
        if verdict is None:
            p_before = None
            continue
        rise = verdict.logit - last_logit
        if largest is None or rise > largest[0]:
            p_after = verdict.p_violation
            largest = rise, Explanation(turn=turn, p_before=p_before, p_after=p_after)
        last_logit, p_before = verdict.logit, verdict.p_violation
    assert largest is not None  # the whole conversation has a verdict: it is violated
    return largest[1]
