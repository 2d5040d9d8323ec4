"""Our own wire format, turn by turn: what each rule says at the end of every turn.

    POST /v1/check/turns   as /v1/check, and "since": 4, the first message that is new

The conversation is computed once, and at the end of every turn each rule's suffix. With `since` the
verdict is of what is new: an old violation does not block every later turn while it stays in the
conversation. A rule that was violated before would be violated by the whole conversation for ever;
it judges the messages from `since` on, without those before them. Knows nothing of other formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Annotated, Literal, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator

from guard.errors import GuardError
from serve.api.access import Caller
from serve.api.formats import check
from serve.api.formats.check import CheckRequest, TokenUsage, UnjudgedRule
from serve.api.input.limits import MAX_TURNS
from serve.api.input.strict_json import StrictRoute
from serve.api.service import CheckService, DecidedCheck, Question, rulings_of
from serve.api.wire_format import WireFormat
from serve.policy.logic import Decision, any_rule
from serve.policy.ruling import Ruling, any_of

router = APIRouter(route_class=StrictRoute)
PATH = "/v1/check/turns"


class TurnsRequest(CheckRequest):
    """A conversation to check at the end of every message from `since` on."""

    since: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _has_something_new(self) -> Self:
        if self.since >= len(self.messages):
            raise ValueError(f"since: {self.since}, and there are {len(self.messages)} messages")
        if len(self.messages) - self.since > MAX_TURNS:
            raise ValueError(f"at most {MAX_TURNS} turns are checked at once; raise `since`")
        return self


class TurnResult(BaseModel):
    """What the rules say at the end of message `turn`, counted from 0."""

    turn: int
    verdict: Literal["allow", "violation", "unjudged"]
    p_violation: dict[str, float]
    violated: list[str]
    unjudged: list[UnjudgedRule]

    @classmethod
    def of(cls, turn: int, decided: DecidedCheck) -> TurnResult:
        verdicts = decided.check.verdicts
        return cls(
            turn=turn,
            verdict=decided.decision.ruling.value,
            p_violation={verdict.rule: verdict.p_violation for verdict in verdicts},
            violated=decided.violated,
            unjudged=check.unjudged_rules(decided.check),
        )


class TurnsResponse(BaseModel):
    """The turns from `since` on, and what they mean together.

    `first_violation` names the first of them at whose end a rule is violated. Rules `judged_alone`
    were violated before `since`: they judged the messages from there on by themselves, at the end
    of each, and count so in `verdict`. Each has the highest probability of that; None where it
    could not be judged. Where a check failed after a violation was known, `turns` end before it.
    """

    verdict: Literal["allow", "violation", "unjudged"]
    decided_by: list[str]
    rule_set: str | None
    turns: list[TurnResult]
    first_violation: dict[str, int]
    judged_alone: dict[str, float | None]
    usage: TokenUsage


@router.post(PATH)
async def check_turns(body: TurnsRequest, request: Request) -> TurnsResponse:
    """Put a conversation to the rules at the end of every turn."""
    question = replace(check.asked(body, request), within=body.conversation)
    rule_set = question.rule_set
    Caller.of(request).check_size([body.conversation])
    start = len(body.tool_turns) + body.since  # of what is new
    before: list[DecidedCheck] = []
    violated_before: list[str] = []
    if body.since:
        since = replace(question, purpose="since")
        service = CheckService.of(request)
        before = [await service.check(request, body.conversation[:start], since)]
        violated_before = before[0].violated
    whole, alone, failure = await _at_ends(request, body, question, start, violated_before)
    rulings = _rulings(whole, alone, violated_before)
    decisions = [rule_set.decide(at_end, body.metadata or {}) for at_end in rulings]
    if failure and not any(decision.ruling is Ruling.VIOLATION for decision in decisions):
        raise failure
    decision = _together(decisions)
    turns = dict(enumerate(whole, start=body.since))
    return TurnsResponse(
        verdict=decision.ruling.value,
        decided_by=list(decision.decided_by),
        rule_set=rule_set.name,
        turns=[TurnResult.of(turn, decided) for turn, decided in turns.items()],
        first_violation=_first_violations(turns, violated_before),
        judged_alone=_highest(alone, violated_before),
        usage=TokenUsage.of([decided.check for decided in (*before, *whole, *alone)]),
    )


async def _at_ends(
    request: Request,
    body: TurnsRequest,
    question: Question,
    start: int,
    violated_before: Sequence[str],
) -> tuple[list[DecidedCheck], list[DecidedCheck], GuardError | None]:
    """The checks at the end of each message from `start` on, and those of what is new by the rules
    that were violated before; of each up to the first that fails, and an error.
    """
    service, conversation = CheckService.of(request), body.conversation
    rules = replace(
        question.rule_set, rules=tuple(violated_before), violated_if=any_rule(violated_before)
    )
    of_new = replace(question, rule_set=rules, purpose="since")
    whole: list[DecidedCheck] = []
    alone: list[DecidedCheck] = []
    ends = range(start + 1, len(conversation) + 1)
    failure: GuardError | None = None
    try:
        for end in ends:
            whole.append(await service.check(request, conversation[:end], question))
    except GuardError as error:
        failure = error
    try:
        for end in ends[: len(whole) if violated_before else 0]:
            # At every turn: a rule may judge the last one only.
            new = (*body.tool_turns, *conversation[start:end])
            alone.append(await service.check(request, new, of_new))
    except GuardError as error:
        failure = failure or error
    return whole, alone, failure


def _rulings(
    whole: Sequence[DecidedCheck], alone: Sequence[DecidedCheck], violated_before: Sequence[str]
) -> Iterable[dict[str, Ruling]]:
    """The rulings at the end of each turn; of a rule violated before, by the new messages alone."""
    for whole_check, new_check in zip_longest(whole, alone):
        rulings = rulings_of(whole_check.check) | dict.fromkeys(violated_before, Ruling.UNJUDGED)
        if new_check is not None:
            rulings |= rulings_of(new_check.check)
        yield rulings


def _highest(
    alone: Sequence[DecidedCheck], violated_before: Sequence[str]
) -> dict[str, float | None]:
    """The highest probability of each of these rules; None for a rule that was never judged."""
    highest: dict[str, float | None] = dict.fromkeys(violated_before)
    for decided in alone:
        for verdict in decided.check.verdicts:
            highest[verdict.rule] = max(highest[verdict.rule] or 0.0, verdict.p_violation)
    return highest


def _together(decisions: Sequence[Decision]) -> Decision:
    """The first that is a violation; if none is, the first that is unjudged, else the first."""
    ruling = any_of([decision.ruling for decision in decisions])
    return next(decision for decision in decisions if decision.ruling is ruling)


def _first_violations(
    turns: Mapping[int, DecidedCheck], violated_before: Sequence[str]
) -> dict[str, int]:
    first: dict[str, int] = {}
    for turn, decided in turns.items():
        for rule in decided.violated:
            if rule not in violated_before:
                first.setdefault(rule, turn)
    return first


FORMAT = WireFormat(
    router,
    check.error_body,
    lambda text: check.rulings(json.loads(text), "turns"),
    requests=tuple(replace(example, path=PATH) for example in check.FORMAT.requests),
)
