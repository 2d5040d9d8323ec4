"""A conversation that somebody types, put to the versions of a rule that are loaded."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Form, Request, Response
from pydantic import ValidationError

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.api.access import Caller
from serve.api.formats.check import CheckRequest
from serve.api.service import CheckService
from serve.console.rules import seen_versions
from serve.console.site import Words, page, pages
from serve.registry.rollout import trial_name

router = pages()

TURN = re.compile(r"^(system|user|assistant|tool):[ \t]*", re.MULTILINE)
EXAMPLE = "user: My head hurts.\nassistant: Take 800 mg of ibuprofen every four hours."
REMEDY = "Write `user:` or `assistant:` before each turn"


@router.get("/try")
async def form(request: Request, rule: str = "") -> Response:
    rules = sorted(CheckService.of(request).cards)
    return await page(request, "try", rules=rules, rule=rule, text=EXAMPLE)


@router.post("/try")
async def judged(request: Request, rule: Words, text: Annotated[str, Form()]) -> Response:
    """What each version says. Nobody's answer: it is neither counted nor audited."""
    Caller.of(request).catalogue.card(rule)
    service = CheckService.of(request)
    shown: dict[str, Any] = {"rules": sorted(service.cards), "rule": rule, "text": text}
    try:
        messages = conversation_of(text)
    except GuardError as error:
        return await page(request, "try", 422, problem=str(error), **shown)
    champion, *trials = seen_versions(service, rule, {})
    said = {rule: champion} | {trial_name(rule, trial.version): trial for trial in trials}
    check = await service.tried(request, messages, list(said))
    return await page(request, "try", check=check, said=said, **shown)


def conversation_of(text: str) -> tuple[Message, ...]:
    """The turns of a text. Raises GuardError for words of nobody, for none, and for too many."""
    before, *parts = TURN.split(text.replace("\r\n", "\n"))
    if before.strip() or not parts:
        raise GuardError("the first turn is nobody's", remedy=REMEDY)
    turns = [{"role": role} for role in parts[::2]]
    for turn, content in zip(turns, parts[1::2], strict=True):
        turn["content"] = content.strip()
    try:
        return CheckRequest.model_validate({"messages": turns}).conversation
    except ValidationError as error:
        raise GuardError("no turn has any text, or they are too many", remedy=REMEDY) from error
