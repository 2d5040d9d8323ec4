"""OpenAI's messages and plain texts as the engine's conversation, for the formats that have them.

`guard/conversation/chat.py` renders a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from guard.conversation.chat import ChatMessage, ContentPart, turns
from guard.conversation.example import Message
from guard.errors import GuardError
from serve.api.errors import Unjudged
from serve.api.input.limits import MAX_CHARACTERS, MAX_MESSAGES

# The first wrong message is enough: ten thousand would take seconds to name.
ChatMessages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


def from_chat(
    messages: Iterable[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[Message, ...]:
    """OpenAI's messages as a conversation, after the tools' descriptions.

    Raises Unjudged if there is none, it is too long or nested too deeply, or it is not Unicode.
    """
    try:
        conversation = turns(messages, tools)
    except GuardError as error:
        raise Unjudged(str(error), "unread_content") from error
    characters = sum(len(message.content) for message in conversation)
    if characters > MAX_CHARACTERS:
        raise Unjudged(
            f"the conversation has {characters} characters; the limit is {MAX_CHARACTERS}",
            "too_long",
        )
    if not conversation:
        raise Unjudged("there is no message", "nothing_said")
    return conversation


def from_text(text: str) -> tuple[Message, ...]:
    """A text that nobody said to anybody: one message of the user's. Raises as `from_chat`."""
    return from_chat([ChatMessage(role="user", content=text)])


def from_texts(texts: Iterable[str], key: str) -> list[tuple[Message, ...]]:
    """The texts under a key of a body, each as `from_text`; what is raised names the text."""
    conversations: list[tuple[Message, ...]] = []
    for index, text in enumerate(texts):
        try:
            conversations.append(from_text(text))
        except Unjudged as error:
            raise Unjudged(f"{key}.{index}: {error.reason}", error.code) from error
    return conversations


def from_parts(parts: list[ContentPart]) -> tuple[Message, ...]:
    """A text in parts, as `from_text`."""
    return from_chat([ChatMessage(role="user", content=parts)])
