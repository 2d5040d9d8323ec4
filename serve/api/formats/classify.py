"""A text classifier over HTTP: a text, and a score for each of two labels that sum to one.

    POST /classify          {"inputs": "..."}   every rule that the caller may ask
    POST /{rule}/classify   {"inputs": "..."}   one of them

vLLM's semantic router calls its `http_classify` backend so. It holds the score of "violation" to a
threshold of its own, so scores are moved: that of a rule's card is always a half. A text is judged
as a user's message. Without a verdict there are no labels but status 422. Knows no other format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request

from guard.conversation.chat import ChatMessage
from guard.verdict import Verdict
from serve.api.access import Caller
from serve.api.formats.conversation import KnownKeys, from_chat, plain_error
from serve.api.input.strict_json import StrictRoute
from serve.api.service import CheckService, Question, violated
from serve.api.wire_format import REPLY, RULE, ExampleRequest, WireFormat

router = APIRouter(route_class=StrictRoute)
Labels = list[dict[str, Any]]
VIOLATION, ALLOW = "violation", "allow"


class ClassifyRequest(KnownKeys):
    """The text that is classified."""

    inputs: str


@router.post("/classify")
async def classify(body: ClassifyRequest, request: Request) -> Labels:
    """Put a text to every rule; the score is the highest of theirs."""
    return await _classified(body, request, None)


@router.post("/{rule}/classify")
async def classify_by(rule: str, body: ClassifyRequest, request: Request) -> Labels:
    """Put a text to one rule."""
    return await _classified(body, request, [rule])


async def _classified(
    body: ClassifyRequest, request: Request, rules: Sequence[str] | None
) -> Labels:
    """Both labels. Raises Unjudged where no rule is violated and one has no verdict."""
    question = Question(Caller.of(request).catalogue.selected(rules))
    conversation = from_chat([ChatMessage(role="user", content=body.inputs)])
    several = await CheckService.of(request).check_each(request, [conversation], question)
    violated(several)
    ((check, _),) = several.answered
    score = max(map(violation_score, check.verdicts), default=0.0)
    return [{"label": VIOLATION, "score": score}, {"label": ALLOW, "score": 1 - score}]


def violation_score(verdict: Verdict) -> float:
    """The probability of a violation, moved so that the rule's threshold is a half: its odds over
    the threshold's. A threshold of a half moves nothing.
    """
    violation = verdict.p_violation * (1 - verdict.threshold)
    allow = (1 - verdict.p_violation) * verdict.threshold
    if violation + allow == 0:  # probability and threshold are both 0, or both 1
        return 1.0
    return violation / (violation + allow)


def _reading(text: str) -> list[str]:
    scores = {entry["label"]: entry["score"] for entry in json.loads(text)}
    return [VIOLATION if scores[VIOLATION] >= 0.5 else ALLOW]


FORMAT = WireFormat(
    router,
    plain_error,
    _reading,
    requests=(ExampleRequest(f"/{RULE}/classify", {"inputs": REPLY["content"]}, ("inputs",)),),
)
