"""LiteLLM's generic guardrail API: what goes to a model and what comes back, one call each.

    POST /beta/litellm_basic_guardrail_api   {"input_type": "request" | "response", ...}

LiteLLM sends the conversation with the request and only the new texts with the response. Both have
the same `litellm_call_id`, so the conversation is kept under it, and a reply is judged as the end
of its conversation. Without one it is unjudged: no rule was trained on a reply alone. The rules are
those of `additional_provider_specific_params`, by default all: `{rules: [...]}`, or
`{rule_set: ..., metadata: {...}}`.

An answer is {"action": "NONE"} or {"action": "BLOCKED", "blocked_reason"}. What has no verdict is
status 422 without an action, which LiteLLM blocks unless told otherwise by `fail_on_error: false`.
Specification: https://docs.litellm.ai/docs/adding_provider/generic_guardrail_api. Knows nothing of
other formats.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import APIRouter, Request
from pydantic import Field, model_validator

from guard.conversation import keys
from guard.conversation.chat import (
    MAX_PARTS,
    ChatMessage,
    ContentPart,
    PartlyRead,
    ToolCalls,
    function_of,
    is_seen,
    unread_parts,
)
from guard.conversation.example import Message
from guard.errors import GuardError
from serve.api.access import Caller
from serve.api.errors import Unjudged
from serve.api.formats.conversation import NoHiddenWords, from_chat, plain_error
from serve.api.input import limits
from serve.api.input.strict_json import StrictRoute
from serve.api.service import CheckService, Question, violated
from serve.api.wire_format import ASKED, REPLY, RULE, ExampleRequest, WireFormat

router = APIRouter(route_class=StrictRoute)
PATH = "/beta/litellm_basic_guardrail_api"


class GuardrailParams(NoHiddenWords):
    """What the gateway's configuration of this guardrail says."""

    rules: Annotated[list[str], Field(min_length=1, max_length=limits.MAX_RULES)] | None = None
    rule_set: str | None = None
    metadata: limits.Metadata | None = None


class GatewayCaller(NoHiddenWords):
    """The caller, by the gateway's keys."""

    silent_keys: ClassVar[keys.Shapes] = {
        **dict.fromkeys(("user_api_key_alias", "user_api_key_team_alias"), keys.ANYTHING),
        **dict.fromkeys(("user_api_key_user_id", "user_api_key_end_user_id"), keys.ANYTHING),
        **dict.fromkeys(("user_api_key_hash", "user_api_key_org_id"), keys.ID),
        "user_api_key_user_email": keys.ANYTHING,
    }

    user_api_key_team_id: Annotated[str, Field(max_length=limits.MAX_SALT)] | None = None


class GuardrailRequest(NoHiddenWords):
    """What is to be checked."""

    silent_keys: ClassVar[keys.Shapes] = {
        "litellm_trace_id": keys.ID,
        "litellm_version": keys.WORD,
        "model": keys.MESSAGE["model"],
        "request_headers": keys.ANYTHING,
        "usage": keys.MESSAGE["usage"],
    }

    input_type: Literal["request", "response"]
    litellm_call_id: Annotated[str, Field(max_length=limits.MAX_CALL_ID)] | None = None
    # For a chat, the texts, images and tool calls of all its messages.
    texts: Annotated[list[str], Field(fail_fast=True)] | None = None
    images: Annotated[list[str], Field(max_length=MAX_PARTS)] | None = None
    structured_messages: (
        Annotated[list[ChatMessage], Field(max_length=limits.MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    tool_calls: ToolCalls | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=limits.MAX_TOOLS)] | None = None
    request_data: GatewayCaller = GatewayCaller()
    additional_provider_specific_params: GuardrailParams | None = None

    @model_validator(mode="after")
    def _has_few_texts(self) -> Self:
        is_read = self.input_type == "response" or not self.structured_messages
        if is_read and self.texts and len(self.texts) > limits.MAX_TEXTS:
            raise ValueError(f"there are {len(self.texts)} texts; the limit is {limits.MAX_TEXTS}")
        return self

    @property
    def sent(self) -> tuple[Message, ...]:
        """A request's conversation; if it is not a chat, its texts as the user's messages."""
        if self.structured_messages:
            return self._with_unread(from_chat(self.structured_messages, self.tools or ()))
        messages = [ChatMessage(role="user", content=text) for text in self.texts or ()]
        if self.images:
            messages.append(ChatMessage(role="user", content=self._unread_images))
        if self.tool_calls:
            messages.append(ChatMessage(role="assistant", tool_calls=self.tool_calls))
        return from_chat(messages, self.tools or ())

    def replies_after(
        self, sent: tuple[Message, ...]
    ) -> tuple[list[tuple[Message, ...]], Unjudged | None]:
        """A response's replies, each at the end of the conversation `sent`, and why one of them is
        not judged.

        Each has all images and tool calls: the format does not say whose they are. A blank reply
        among several is left out, as it says nothing.
        """
        try:
            calls, unread = self._beside_the_texts()
        except Unjudged as error:
            return [], error
        conversations: list[tuple[Message, ...]] = []
        problem: Unjudged | None = None
        characters = 0
        for text in self._spoken or [""]:
            content = "\n".join(part for part in (text, calls) if part)
            characters += len(content)
            if characters > limits.MAX_CHARACTERS:
                why = f"the replies have more than {limits.MAX_CHARACTERS} characters"
                problem = problem or Unjudged(why, "too_long")
                break
            try:
                conversations.append((*sent, _reply(content, unread)))
            except Unjudged as error:
                problem = problem or error
        return conversations, problem

    def _beside_the_texts(self) -> tuple[str, tuple[str, ...]]:
        """The tool calls as one text, and what no rule can read. Raises Unjudged."""
        if not (self.images or self.tool_calls):
            return "", ()
        content = self._unread_images or None
        message = ChatMessage(role="assistant", content=content, tool_calls=self.tool_calls)
        (turn,) = from_chat([message])
        return turn.content, unread_parts([turn])

    def _with_unread(self, chat: tuple[Message, ...]) -> tuple[Message, ...]:
        """A chat, partly read if what stands beside its messages stands in none of them."""
        lines_said: set[str] = set()
        calls: set[str] = set()
        for turn in chat:
            lines_said.update(turn.content.splitlines())
        for message in self.structured_messages or ():
            calls.update(map(_call_key, message.calls))
        in_order = sorted(lines_said)
        beside: list[str] = []
        if any(not _is_said(text, lines_said, in_order) for text in self.texts or ()):
            beside.append("texts has what no message says")
        if not calls.issuperset(map(_call_key, self.tool_calls or ())):
            beside.append("tool_calls has a call of no message")
        if self.images and not unread_parts(chat):
            beside.append("images has an image of no message")
        if not beside:
            return chat
        *before, last = chat
        return (*before, PartlyRead(last.role, last.content, (*unread_parts([last]), *beside)))

    @property
    def _spoken(self) -> list[str]:
        """The texts that are not empty. Beyond MAX_CHARACTERS none is looked at: it is refused."""
        spoken: list[str] = []
        characters = 0
        for text in self.texts or ():
            characters += len(text)
            if characters > limits.MAX_CHARACTERS or is_seen(text):
                spoken.append(text)
        return spoken

    @property
    def _unread_images(self) -> list[ContentPart]:
        return [ContentPart(type="image_url") for _ in self.images or ()]


def _is_said(text: str, lines_said: set[str], in_order: Sequence[str]) -> bool:
    """Whether each line of a text is among `lines_said`. The last may be the beginning of
    one: LiteLLM cuts texts at its option `max_text_chars`.
    """
    if not text:
        return True
    *lines, last = text.splitlines()
    first = bisect_left(in_order, last)  # what begins so stands from here on
    begins_one = first < len(in_order) and in_order[first].startswith(last)
    return begins_one and lines_said.issuperset(lines)


def _call_key(call: dict[str, Any]) -> str:
    """A text of a call, the same in whatever order its keys come. Raises Unjudged."""
    function, beside = function_of(call)
    fields: list[str] = []
    try:
        for key, value in (*function.items(), *beside.items()):
            if value is not None and key not in keys.CALL:
                fields.append(repr((key, value)))
    except RecursionError:
        raise Unjudged("a tool call is nested too deeply to be read", "unread_content") from None
    return " ".join(sorted(fields))


def _reply(content: str, unread: tuple[str, ...]) -> Message:
    """A reply as a turn. Raises Unjudged if it is not Unicode."""
    try:
        if unread:
            return PartlyRead("assistant", content, unread)
        return Message("assistant", content)
    except GuardError as error:
        raise Unjudged(str(error), "unread_content") from error


@router.post(PATH)
async def guard(body: GuardrailRequest, request: Request) -> dict[str, str]:
    """Put a request, or the replies to it, to the rules; the action that LiteLLM takes. A missing
    action would read as "NONE" there.
    """
    caller, service = Caller.of(request), CheckService.of(request)
    params = body.additional_provider_specific_params or GuardrailParams()
    rule_set = caller.catalogue.selected(params.rules, params.rule_set)
    question = Question(rule_set, params.metadata)
    problem: Unjudged | None = None
    if body.input_type == "request":
        salted = replace(question, cache_salt=body.request_data.user_api_key_team_id or None)
        rules = await service.check_sent(request, body.litellm_call_id, body.sent, salted)
    else:
        call = caller.calls.find(body.litellm_call_id)
        conversations, problem = body.replies_after(call.messages)
        salted = replace(question, cache_salt=call.cache_salt)
        rules = violated(await service.check_each(request, conversations, salted))
    if rules:
        return {"action": "BLOCKED", "blocked_reason": f"violates {', '.join(rules)}"}
    if problem is not None:
        raise problem
    return {"action": "NONE"}


def _reading(text: str) -> list[str]:
    return ["violation" if json.loads(text).get("action") == "BLOCKED" else "allow"]


def _example(input_type: str, key: str, content: list[Any]) -> ExampleRequest:
    body = {"input_type": input_type, "litellm_call_id": "1", key: content}
    params = {"additional_provider_specific_params": {"rules": [RULE]}}
    return ExampleRequest(PATH, body | params, (key,))


FORMAT = WireFormat(
    router,
    plain_error,
    _reading,
    requests=(
        _example("request", "structured_messages", [ASKED, REPLY]),
        _example("request", "texts", [REPLY["content"]]),
    ),
    replies=(_example("response", "texts", [REPLY["content"]]),),
    call_id="litellm_call_id",
    is_reply=lambda body: body.get("input_type") == "response",
)
