"""What several formats have in their bodies: OpenAI's messages as the engine's conversation, keys
that nobody knows, and OpenAI's errors. `guard/conversation/chat.py` renders a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from guard.conversation import keys
from guard.conversation.chat import ChatMessage, turns
from guard.conversation.example import Message
from guard.errors import GuardError
from serve.api.errors import NAMED_PROBLEMS, Unjudged
from serve.api.input.limits import MAX_CHARACTERS, MAX_MESSAGES
from serve.engine.codes import Code

# OpenAI's own codes; where it has none, `code` says why there is no verdict.
OPENAI_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}
# The first wrong message is enough: ten thousand would take seconds to name.
ChatMessages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


def from_chat(
    messages: Iterable[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[Message, ...]:
    """OpenAI's messages as a conversation, after the tools. Raises Unjudged if it can't be read."""
    try:
        conversation = turns(messages, tools)
    except GuardError as error:
        raise Unjudged(str(error), "unread_content") from error
    characters = sum(len(message.content) for message in conversation)
    if characters > MAX_CHARACTERS:
        why = f"the conversation has {characters} characters; the limit is {MAX_CHARACTERS}"
        raise Unjudged(why, "too_long")
    if not conversation:
        raise Unjudged("there is no message", "nothing_said")
    return conversation


class KnownKeys(BaseModel):
    """A body whose unknown keys are refused: each by name, or as one error where there are more
    than an answer names. Of a body full of them pydantic would make an error each, for seconds.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_unknown_keys(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        unknown = body.keys() - cls.model_fields.keys()
        if len(unknown) > NAMED_PROBLEMS:
            raise ValueError(f"{len(unknown)} keys are unknown; GET /docs lists the known ones")
        return body


class NoHiddenWords(BaseModel):
    """A body as a gateway sends it. An unknown key that may hold words, which no rule would read,
    is refused, unless it is one of `silent_keys`, which carry no text that is judged.
    """

    silent_keys: ClassVar[keys.Shapes] = {}

    @model_validator(mode="before")
    @classmethod
    def _hides_no_words(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for key in keys.unread_keys(body, cls.silent_keys, cls.model_fields):
            raise ValueError(f"the key {key!r} is unknown, and no rule would read what it says")
        return body


def openai_error(status: int, message: str, code: Code) -> dict[str, Any]:
    """What OpenAI's API answers instead of a result, in all of its formats."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    named = OPENAI_CODES.get(status, code)
    return {"error": {"message": message, "type": kind, "param": None, "code": named}}


def plain_error(status: int, message: str, code: Code) -> dict[str, Any]:
    """An error with nothing that a gateway takes for an action."""
    return {"error": message, "code": code}
