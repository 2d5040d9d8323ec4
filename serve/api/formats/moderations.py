"""OpenAI's moderations: every rule is a category, and a score is a calibrated probability.

    POST /v1/moderations   {"input": "..."}   or a list of texts, or a list of content parts

The format has texts and no roles: each is judged as one message of the user's, so a rule about what
an assistant says belongs to another format. A category is flagged by the threshold of its rule's
card. If a single rule has no verdict there is no result at all but status 422 and a code: a
category that is missing would read as one that is not flagged. Knows nothing of other formats.
"""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from guard.conversation.chat import ChatMessage, ContentPart
from guard.conversation.example import Message
from serve.api.access import Caller
from serve.api.catalogue import Catalogue
from serve.api.errors import Unjudged
from serve.api.formats.conversation import KnownKeys, from_chat, openai_error
from serve.api.input.limits import MAX_TEXTS
from serve.api.input.strict_json import StrictRoute
from serve.api.service import CheckService, DecidedCheck, Question
from serve.api.wire_format import REPLY, RULE, ExampleRequest, WireFormat
from serve.policy.rule_set import RuleSet
from serve.policy.ruling import Ruling

router = APIRouter(route_class=StrictRoute)

# Model names that clients of OpenAI's own service send: here, every rule.
OPENAI_MODELS = (
    "omni-moderation-latest",
    "omni-moderation-2024-09-26",
    "text-moderation-latest",
    "text-moderation-stable",
)
DEFAULT_MODEL = OPENAI_MODELS[0]

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]
Parts = Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_TEXTS)]


class ModerationRequest(KnownKeys):
    """Texts, or one in parts. `model` is a rule or a rule set; by default every rule."""

    input: str | Texts | Parts
    model: str | None = None


@router.post("/v1/moderations")
async def moderate(body: ModerationRequest, request: Request) -> dict[str, Any]:
    """Put each text to the rules: a result for each, as OpenAI's API has it."""
    model = body.model or DEFAULT_MODEL
    rule_set = _selected(Caller.of(request).catalogue, model)
    conversations = _conversations(body.input)
    checks = await CheckService.of(request).judge_each(request, conversations, Question(rule_set))
    results = [_result(decided) for decided in checks]
    return {"id": f"modr-{uuid.uuid4().hex}", "model": model, "results": results}


def _result(decided: DecidedCheck) -> dict[str, Any]:
    """The verdicts of a check, each a category; flagged is what they mean together."""
    categories, scores = {}, {}
    for verdict in decided.check.verdicts:
        categories[verdict.rule] = verdict.violates
        scores[verdict.rule] = verdict.p_violation
    return {
        "flagged": decided.decision.ruling is Ruling.VIOLATION,
        "categories": categories,
        "category_scores": scores,
        "category_applied_input_types": {rule: ["text"] for rule in categories},
    }


def _selected(catalogue: Catalogue, model: str) -> RuleSet:
    """The rules that judge a text. Raises HTTPException 404 for a model that is none of them."""
    if model in OPENAI_MODELS:
        return catalogue.selected(None)
    if model in catalogue.rule_sets:
        return catalogue.selected(None, model)
    return catalogue.selected([model])


def _conversations(texts: str | list[str] | list[ContentPart]) -> list[tuple[Message, ...]]:
    """A message of the user's for each text; parts are one text together, as OpenAI has it."""
    contents: list[Any] = [texts]
    if not isinstance(texts, str) and isinstance(texts[0], str):
        contents = [*texts]
    conversations: list[tuple[Message, ...]] = []
    for index, content in enumerate(contents):
        try:
            conversations.append(from_chat([ChatMessage(role="user", content=content)]))
        except Unjudged as error:
            raise Unjudged(f"input.{index}: {error.reason}", error.code) from error
    return conversations


def _reading(text: str) -> list[str]:
    results = json.loads(text)["results"]
    rulings = ["violation" if result["flagged"] else "allow" for result in results]
    return ["violation" if "violation" in rulings else "allow", *rulings]


FORMAT = WireFormat(
    router,
    openai_error,
    _reading,
    requests=(
        ExampleRequest("/v1/moderations", {"model": RULE, "input": REPLY["content"]}, ("input",)),
    ),
    malformed=400,
)
