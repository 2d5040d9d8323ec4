"""agentgateway's guardrail webhook: what goes to a model and what comes back, one call each.

    POST /request    {"body": {"messages": [{"role", "content"}, ...]}}
    POST /response   {"body": {"choices": [{"message": {"role", "content"}}, ...]}}

The rules are those of the header `guard-rules`, separated by commas, or of the rule set that
`guard-rule-set` names; by default all. A reply comes without its conversation: have the gateway
send one header `call-id` with both calls, and it is judged as the end of its conversation, else it
is unjudged.

An answer is a pass or a reject, and the gateway tells them apart by their fields: a reject without
its status would read as a pass, and so would an error with an `action`, since the gateway does not
look at the status of the HTTP response. Errors have none. Source:
https://github.com/agentgateway/agentgateway
(crates/agentgateway/src/llm/policy/webhook.rs). Knows nothing of other formats.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Header, Request
from pydantic import Field

from guard.conversation import keys
from guard.conversation.chat import ChatMessage
from serve.api.access import Caller
from serve.api.formats.conversation import ChatMessages, NoHiddenWords, from_chat, plain_error
from serve.api.input.limits import MAX_CALL_ID, MAX_TEXTS
from serve.api.input.strict_json import StrictRoute
from serve.api.service import CheckService, Question, violated
from serve.api.wire_format import ASKED, REPLY, RULE, ExampleRequest, WireFormat
from serve.policy.rule_set import RuleSet

router = APIRouter(route_class=StrictRoute)

CallId = Annotated[str | None, Header(alias="call-id", max_length=MAX_CALL_ID)]


def _selected(
    request: Request,
    guard_rules: Annotated[list[str] | None, Header(alias="guard-rules")] = None,
    guard_rule_set: Annotated[str | None, Header(alias="guard-rule-set")] = None,
) -> RuleSet:
    """The rules or the rule set that the headers name. Raises HTTPException 404 for others."""
    names = None
    if guard_rules is not None:
        # Several headers of one name are one list (RFC 9110, section 5.3).
        names = [name.strip() for name in ",".join(guard_rules).split(",")]
    return Caller.of(request).catalogue.selected(names, guard_rule_set)


Selected = Annotated[RuleSet, Depends(_selected)]


class PromptMessages(NoHiddenWords):
    """The messages that are sent to a model."""

    messages: ChatMessages


class PromptRequest(NoHiddenWords):
    """A request to check."""

    body: PromptMessages


class ReplyChoice(NoHiddenWords):
    """One of a model's replies."""

    silent_keys: ClassVar[keys.Shapes] = keys.MESSAGE

    message: ChatMessage


class ReplyChoices(NoHiddenWords):
    """The replies of a model."""

    choices: Annotated[list[ReplyChoice], Field(min_length=1, max_length=MAX_TEXTS)]


class ReplyRequest(NoHiddenWords):
    """A response to check."""

    body: ReplyChoices


@router.post("/request")
async def prompt(
    body: PromptRequest, rule_set: Selected, request: Request, call_id: CallId = None
) -> dict[str, Any]:
    """Put what is sent to a model to the rules."""
    messages = from_chat(body.body.messages)
    service, question = CheckService.of(request), Question(rule_set)
    return _action(await service.check_sent(request, call_id, messages, question))


@router.post("/response")
async def reply(
    body: ReplyRequest, rule_set: Selected, request: Request, call_id: CallId = None
) -> dict[str, Any]:
    """Put what came from a model to the rules, each reply as the end of the conversation."""
    sent = Caller.of(request).calls.find(call_id).messages
    replies = from_chat(choice.message for choice in body.body.choices)
    conversations = [(*sent, message) for message in replies]
    service, question = CheckService.of(request), Question(rule_set)
    return _action(violated(await service.check_each(request, conversations, question)))


def _action(violations: list[str]) -> dict[str, Any]:
    """What the gateway does: nothing, or give this response instead."""
    if not violations:
        return {"action": {"reason": "no rule is violated"}}
    reason = f"violates {', '.join(violations)}"
    return {"action": {"body": f"Refused: {reason}", "status_code": 403, "reason": reason}}


def _reading(text: str) -> list[str]:
    action = json.loads(text)["action"]
    return ["violation" if "status_code" in action else "allow"]


FORMAT = WireFormat(
    router,
    plain_error,
    _reading,
    requests=(
        ExampleRequest(
            "/request",
            {"body": {"messages": [ASKED, REPLY]}},
            ("body", "messages"),
            {"guard-rules": RULE, "call-id": "1"},
        ),
    ),
    replies=(
        ExampleRequest(
            "/response",
            {"body": {"choices": [{"index": 0, "message": REPLY}]}},
            ("body", "choices", 0, "message"),
            {"guard-rules": RULE, "call-id": "1"},
        ),
    ),
    call_id="call-id",
)
