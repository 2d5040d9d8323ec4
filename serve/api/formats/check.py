"""Our own wire format: a conversation and rule names in, a verdict for each rule out.

    POST /v1/check       {"messages": [{"role", "content"}, …], "rules": ["medical_advice", …]}
                         messages as OpenAI has them, and "tools": [{"type": "function", …}]
                         or "rule_set": "support", "metadata": {"channel": "email"}
                         default: every rule that is served
                         and "policies": ["never promise a date", …], which are no rules
    GET  /v1/rules       the rules, their wording and their thresholds
    GET  /v1/rule_sets   the rule sets, and their rules

"Could not judge" is an answer of its own (`unjudged`), per rule and for the whole check, and never
an "allow". Knows nothing of other formats.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from guard.conversation.chat import ChatMessage, says_nothing
from guard.conversation.example import Message
from guard.errors import GuardError
from guard.verdict import Verdict
from serve.api.access import Caller
from serve.api.errors import Unjudged, engine_failure
from serve.api.formats.conversation import KnownKeys, from_chat
from serve.api.input import limits
from serve.api.input.strict_json import StrictRoute
from serve.api.service import CheckService, DecidedCheck, Question
from serve.api.wire_format import ASKED, REPLY, RULE, ExampleRequest, WireFormat
from serve.engine import Check
from serve.engine.codes import Code
from serve.policy.rule_set import RuleSet
from serve.policy.stated import is_stated, named_policies
from serve.registry.rollout import ENFORCE

log = logging.getLogger(__name__)

router = APIRouter(route_class=StrictRoute)
EXPLAINING_SHARE = 0.7  # of the time that is left once the verdicts are known


class StrictBody(KnownKeys):
    """A body without unknown keys, and without conversions between types."""

    model_config = ConfigDict(strict=True)


class MessageBody(ChatMessage):
    """One of OpenAI's messages, without a key that may say what no rule reads. Ids, annotations, a
    model's reasoning and the like may stand there and are not judged.
    """

    model_config = ConfigDict(strict=True)

    @model_validator(mode="after")
    def _has_no_unread_keys(self) -> Self:
        for key in self.unread_keys():
            raise ValueError(f"{key}: no rule would read what it says; leave it out")
        return self


def _readable(policy: str) -> str:
    """The policy in one line. Raises ValueError for one without a word."""
    if says_nothing([Message("system", policy)]):
        raise ValueError("says nothing")
    return " ".join(policy.split())


def _distinct(texts: list[str] | None) -> list[str] | None:
    if texts is not None and len(set(texts)) < len(texts):
        raise ValueError("one of them stands there twice")
    return texts


Policy = Annotated[
    str, Field(min_length=1, max_length=limits.MAX_POLICY), AfterValidator(_readable)
]


class CheckRequest(StrictBody):
    """A conversation, and the rules or the rule set to check it against; beside them `policies`,
    sentences that are judged as they stand. With these there may be no rules.

    `tools` are what the assistant may call, and are judged with the messages. `metadata` are what
    the conditions of a rule set read. Conversations of different `cache_salt` share nothing in the
    cache: give every tenant one, and none learns from the token counts or the time of its checks
    which texts another one has sent.
    """

    messages: Annotated[
        list[MessageBody], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True)
    ]
    tools: Annotated[list[dict[str, Any]] | None, Field(max_length=limits.MAX_TOOLS)] = None
    rules: Annotated[
        list[str] | None, Field(max_length=limits.MAX_RULES), AfterValidator(_distinct)
    ] = None
    policies: Annotated[
        list[Policy] | None,
        Field(min_length=1, max_length=limits.MAX_RULES, fail_fast=True),
        AfterValidator(_distinct),
    ] = None
    rule_set: str | None = None
    metadata: limits.Metadata | None = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=limits.MAX_SALT)] = None

    _conversation: tuple[Message, ...] = PrivateAttr()

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The conversation that is judged: the tools, if there are any, then a turn per message."""
        return self._conversation

    @property
    def tool_turns(self) -> tuple[Message, ...]:
        return self._conversation[: -len(self.messages)]

    @model_validator(mode="after")
    def _is_readable(self) -> Self:
        try:
            self._conversation = from_chat(self.messages, self.tools or ())
        except Unjudged as error:
            raise ValueError(error.reason) from error
        if says_nothing(self._conversation):
            raise ValueError("no message has any text")
        return self

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if self.rules == [] and not self.policies:
            raise ValueError("rules: name at least one, or state policies")
        return self

    @model_validator(mode="after")
    def _has_metadata_for_a_rule_set(self) -> Self:
        if self.metadata is not None and self.rule_set is None:
            raise ValueError("metadata are for the conditions of a rule set; name one")
        return self


class ExplainedCheckRequest(CheckRequest):
    """A check that may be asked which turn carries each violation."""

    explain: bool = False

    @model_validator(mode="after")
    def _has_turns_to_check(self) -> Self:
        if self.explain and len(self.messages) > limits.MAX_TURNS:
            raise ValueError(f"at most {limits.MAX_TURNS} messages can be explained")
        return self


class RuleResult(BaseModel):
    """One rule's verdict; a violation is `p_violation` >= `threshold`. `by` is what answered:
    weights of a method, or the `reader` or the bare `base` where the rule has no weights.

    It is not `confident` where the probability is too near to the threshold, or the rule's
    validation rows were not like the conversation. `code` says so where they lack its language.
    `rule` is `policies.0` for the first policy that the request states.
    """

    rule: str
    verdict: Literal["allow", "violation"]
    p_violation: float
    threshold: float
    confident: bool
    by: str
    code: Code | None = None

    @classmethod
    def of(cls, verdict: Verdict) -> RuleResult:
        return cls(
            rule=verdict.rule,
            verdict=verdict.word,
            p_violation=verdict.p_violation,
            threshold=verdict.threshold,
            confident=verdict.confident,
            code="unseen_language" if verdict.unseen_language else None,
            by=verdict.by,
        )


class UnjudgedRule(BaseModel):
    """A rule without a verdict, and why: in a word for machines, and in a sentence."""

    rule: str
    code: Code
    reason: str


def unjudged_rules(check: Check) -> list[UnjudgedRule]:
    unjudged: list[UnjudgedRule] = []
    for rule, refusal in check.refused.items():
        unjudged.append(UnjudgedRule(rule=rule, code=refusal.code, reason=refusal.why))
    return unjudged


class TokenUsage(BaseModel):
    """Prompt tokens over all rules: those taken from the cache, and those computed."""

    cached_tokens: int
    computed_tokens: int

    @classmethod
    def of(cls, checks: Sequence[Check]) -> TokenUsage:
        return cls(
            cached_tokens=sum(check.cached_tokens for check in checks),
            computed_tokens=sum(check.computed_tokens for check in checks),
        )


class Explanation(BaseModel):
    """The turn, counted from 0, at whose end the rule's logit rises most, and the probabilities at
    the ends of the turn before, if that was judged, and of this one.
    """

    turn: int
    p_before: float | None
    p_after: float


class CheckResponse(BaseModel):
    """The verdicts of a check.

    `verdict` is what the rule set's logic says. Where none was asked it is "violation" if any rule
    is violated, else "unjudged" if any could not be judged, else "allow". `decided_by` are the
    rules that it rests on, and conditions on metadata as `metadata.KEY`. `explanations` are of the
    violated rules, where they were asked for and the checks that they take did not fail.
    """

    verdict: Literal["allow", "violation", "unjudged"]
    decided_by: list[str]
    rule_set: str | None
    results: list[RuleResult]
    policies: list[RuleResult] | None = None
    unjudged: list[UnjudgedRule]
    usage: TokenUsage
    latency_ms: float
    explanations: dict[str, Explanation] | None = None

    @classmethod
    def of(cls, decided: DecidedCheck, rule_set: str | None) -> CheckResponse:
        check, decision = decided
        results = [RuleResult.of(verdict) for verdict in check.verdicts]
        names = [*check.refused, *(result.rule for result in results)]
        policies = None
        if any(map(is_stated, names)):
            policies = [result for result in results if is_stated(result.rule)]
        return cls(
            verdict=decision.ruling.value,
            decided_by=list(decision.decided_by),
            rule_set=rule_set,
            results=[result for result in results if not is_stated(result.rule)],
            policies=policies,
            unjudged=unjudged_rules(check),
            usage=TokenUsage.of([check]),
            latency_ms=check.wall_ms,
        )


class ServedRule(BaseModel):
    """A rule that is served: its wording in the prompt, if any, threshold, version and mode; `by`:
    what judges it.
    """

    rule: str
    text: str
    threshold: float
    version: str
    mode: str
    by: str


class ServedRuleSet(BaseModel):
    """A rule set, and its rules."""

    rule_set: str
    rules: list[str]


@router.post("/v1/check", response_model_exclude_none=True)
async def check(body: ExplainedCheckRequest, request: Request) -> CheckResponse:
    """Put a conversation to the rules."""
    question = asked(body, request)
    decided = await CheckService.of(request).check(request, body.conversation, question)
    response = CheckResponse.of(decided, question.rule_set.name)
    if body.explain:
        try:
            first = len(body.tool_turns) + 1
            asked_of = (question, body.conversation, first)
            response.explanations = await explanations(request, decided, *asked_of)
        except GuardError as error:  # the verdicts stand without explanations
            log.warning("violations are not explained: %s", engine_failure(error))
    return response


@router.get("/v1/rules")
async def rules(request: Request) -> list[ServedRule]:
    """The rules that are served."""
    served = []
    for name, card in Caller.of(request).catalogue.rules.items():
        rollout = CheckService.of(request).rollouts.get(name)
        served.append(
            ServedRule(
                rule=name,
                text=card.rule_text,
                threshold=card.threshold,
                version=card.version,
                mode=str(rollout.mode if rollout else ENFORCE),
                by=card.by,
            )
        )
    return served


@router.get("/v1/rule_sets")
async def rule_sets(request: Request) -> list[ServedRuleSet]:
    """The rule sets that can be asked."""
    served = []
    for name, rule_set in Caller.of(request).catalogue.rule_sets.items():
        served.append(ServedRuleSet(rule_set=name, rules=list(rule_set.rules)))
    return served


async def explanations(
    request: Request,
    decided: DecidedCheck,
    question: Question,
    conversation: Sequence[Message],
    first: int = 1,
) -> dict[str, Explanation]:
    """The turn that carries each violation: the one at whose end the rule's logit rises most. Turns
    count from the one that the `first` part of the conversation ends with.

    The whole conversation was computed just before, so each turn costs a suffix of each violated
    rule. Leave-one-out names the turn as well (docs/results/quality.md), but computes all turns
    behind the one that is left out again. Raises as `CheckService.check`.
    """
    violated = decided.violated
    if not violated:
        return {}
    # The verdicts are still to be answered, to a caller who waits no longer than the deadline.
    now = time.monotonic()
    deadline = now + EXPLAINING_SHARE * (request.scope["deadline"] - now)
    explaining = Request({**request.scope, "deadline": deadline}, request.receive)
    growing = [conversation[:end] for end in range(first, len(conversation))]
    rule_set = RuleSet.any_of(violated)
    question = replace(question, rule_set=rule_set, purpose="explanation", within=conversation)
    checks = await CheckService.of(request).check_each(explaining, growing, question)
    turns = []
    for at_end in (*checks.all(), decided):
        turns.append({verdict.rule: verdict for verdict in at_end.check.verdicts})
    return {rule: _largest_rise([verdicts.get(rule) for verdicts in turns]) for rule in violated}


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


def asked(body: CheckRequest, request: Request) -> Question:
    """What the body asks, of what is served now. Raises HTTPException 422 for a misspelt name, and
    for more policies than the caller may state.
    """
    caller, policies = Caller.of(request), named_policies(body.policies or ())
    rule_set = caller.catalogue.selected(body.rules, body.rule_set, unknown=422)
    caller.check_policies(len(policies), len(rule_set.rules))
    rule_set = rule_set.or_any_of(tuple(policies))
    return Question(rule_set, body.metadata, body.cache_salt, policies=policies)


def error_body(status: int, message: str, code: Code) -> dict[str, Any]:
    return {"verdict": "unjudged", "error": message, "code": code}


def rulings(judgement: dict[str, Any]) -> list[str]:
    """The ruling of an answer, and of each of its rules."""
    return [judgement["verdict"], *(result["verdict"] for result in judgement.get("results", ()))]


FORMAT = WireFormat(
    router,
    error_body,
    lambda text: rulings(json.loads(text)),
    requests=(
        ExampleRequest("/v1/check", {"messages": [ASKED, REPLY], "rules": [RULE]}, ("messages",)),
    ),
)
