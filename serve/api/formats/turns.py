"""Our own wire format, turn by turn: what each rule says at the end of every turn.

    POST /v1/check/turns   as /v1/check, and "since": 4, the first message that is new

The conversation is computed once, and at the end of every turn each rule's suffix. With `since` the
verdict is of what is new: an old violation does not block every later turn while it stays in the
conversation. Of a rule that was violated before, the conversation alone would say so for ever; it
is put to the messages from `since` on, without what stands before them. Knows nothing of other
formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator

from guard.chat import tool_turns
from guard.example import Message
from serve.api.access import Caller
from serve.api.formats import check
from serve.api.formats.check import CheckRequest, TokenUsage, UnjudgedRule
from serve.api.limits import MAX_TURNS
from serve.api.service import CheckService, DecidedCheck
from serve.api.strict_json import StrictRoute
from serve.policy.logic import Decision
from serve.policy.rule_set import RuleSet
from serve.policy.ruling import Ruling, any_of

router = APIRouter(route_class=StrictRoute)
MALFORMED = check.MALFORMED


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
        """A check of the conversation up to the end of `turn`."""
        verdicts = decided.check.verdicts
        return cls(
            turn=turn,
            verdict=decided.decision.ruling.value,
            p_violation={verdict.rule: verdict.p_violation for verdict in verdicts},
            violated=_violated(decided),
            unjudged=check.unjudged_rules(decided.check),
        )


class TurnsResponse(BaseModel):
    """The turns from `since` on, and what they mean together.

    `first_violation` names the first of them at whose end a rule is violated. Rules `judged_alone`
    were violated before `since`: of them the messages from there on were judged by themselves, at
    the end of each, which is what they count with in `verdict`. Each has the highest probability of
    that; None where it could not be judged.
    """

    verdict: Literal["allow", "violation", "unjudged"]
    decided_by: list[str]
    rule_set: str | None
    turns: list[TurnResult]
    first_violation: dict[str, int]
    judged_alone: dict[str, float | None]
    usage: TokenUsage


@router.post("/v1/check/turns")
async def check_turns(body: TurnsRequest, request: Request) -> TurnsResponse:
    """Put a conversation to the rules at the end of every turn."""
    rule_set = check.selected(body, Caller.of(request).catalogue)
    tools = tuple(tool_turns(body.tools or ()))
    messages = body.conversation[len(tools) :]
    service = CheckService.of(request)

    async def checked(messages: Sequence[Message], rules: RuleSet) -> DecidedCheck:
        return await service.check(
            request,
            (*tools, *messages),
            rules,
            metadata=body.metadata,
            cache_salt=body.cache_salt,
        )

    checks: list[DecidedCheck] = []
    violated_before: list[str] = []
    if body.since:
        checks.append(await checked(messages[: body.since], rule_set))
        violated_before = _violated(checks[0])
    turns: dict[int, DecidedCheck] = {}
    for turn in range(body.since, len(messages)):
        turns[turn] = await checked(messages[: turn + 1], rule_set)
    judged_alone: dict[str, float | None] = dict.fromkeys(violated_before)
    decisions: list[Decision] = []
    for turn, decided in turns.items():
        alone: dict[str, Ruling] = {}
        if violated_before:  # at every turn: a rule may judge the last one only
            new = messages[body.since : turn + 1]
            checks.append(await checked(new, RuleSet.any_of(violated_before)))
            alone = checks[-1].rulings
            for verdict in checks[-1].check.verdicts:
                highest = judged_alone[verdict.rule] or 0.0
                judged_alone[verdict.rule] = max(highest, verdict.p_violation)
        decisions.append(rule_set.decide(decided.rulings | alone, body.metadata or {}))
    decision = _together(decisions)
    checks += turns.values()
    return TurnsResponse(
        verdict=decision.ruling.value,
        decided_by=list(decision.decided_by),
        rule_set=rule_set.name,
        turns=[TurnResult.of(turn, decided) for turn, decided in turns.items()],
        first_violation=_first_violations(turns, violated_before),
        judged_alone=judged_alone,
        usage=TokenUsage(
            cached_tokens=sum(decided.check.cached_tokens for decided in checks),
            computed_tokens=sum(decided.check.computed_tokens for decided in checks),
        ),
    )


def _violated(decided: DecidedCheck) -> list[str]:
    return [verdict.rule for verdict in decided.check.verdicts if verdict.violates]


def _together(decisions: Sequence[Decision]) -> Decision:
    """What all turns mean: a violation if one is, else unjudged if one is; and what decided that
    first.
    """
    ruling = any_of([decision.ruling for decision in decisions])
    return next(decision for decision in decisions if decision.ruling is ruling)


def _first_violations(
    turns: Mapping[int, DecidedCheck], violated_before: Sequence[str]
) -> dict[str, int]:
    first: dict[str, int] = {}
    for turn, decided in turns.items():
        for rule in _violated(decided):
            if rule not in violated_before:
                first.setdefault(rule, turn)
    return first


def error_body(status: int, message: str) -> dict[str, Any]:
    """As of a check."""
    return check.error_body(status, message)
