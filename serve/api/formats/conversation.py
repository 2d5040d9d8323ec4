"""OpenAI's messages and plain texts as the engine's conversation, for the formats that have them.

Judged are a message's text, its refusal, and the names and arguments of its tool calls, as they
stand. Names of speakers, ids, the schemas of tools and a model's reasoning are not: no rule was
trained on them. What only a picture, a sound or a file says makes the conversation unjudged.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from guard.errors import GuardError
from guard.example import Message
from serve.api.errors import Unjudged
from serve.api.limits import MAX_CHARACTERS, MAX_MESSAGES

# OpenAI's role -> ours.
ROLES = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class ContentPart(BaseModel):
    """A piece of a message: a text, or what cannot be judged."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def words(self) -> str:
        """Its text. Raises Unjudged if it is no text."""
        if self.type not in TEXT_PARTS:
            raise Unjudged(f"a part of type {self.type!r} is no text")
        return self.text or self.refusal or ""


class ChatMessage(BaseModel):
    """One of OpenAI's messages; keys that are not here hold nothing that is judged."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    refusal: str | None = None
    audio: Any = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None  # before there were tool calls

    @property
    def words(self) -> str:
        """All that the message says, a line a part. Raises Unjudged if not all of it is text."""
        if self.audio:
            raise Unjudged("audio is no text")
        lines = []
        if isinstance(self.content, str):
            lines.append(self.content)
        for part in _parts(self.content):
            lines.append(part.words)
        lines.append(self.refusal or "")
        for tool_call in self.tool_calls or ():
            lines.append(_call_words(tool_call))
        if self.function_call:
            lines.append(_call_words({"function": self.function_call}))
        return "\n".join(line for line in lines if line)


ChatMessages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


def from_chat(messages: Iterable[ChatMessage]) -> tuple[Message, ...]:
    """OpenAI's messages as a conversation. Raises Unjudged if not all of them can be judged."""
    return conversation((ROLES[message.role], message.words) for message in messages)


def from_text(text: str) -> tuple[Message, ...]:
    """A text that nobody said to anybody: one message of the user's."""
    return conversation([("user", text)])


def conversation(turns: Iterable[tuple[str, str]]) -> tuple[Message, ...]:
    """A conversation of (role, text) pairs.

    Raises Unjudged if there is none, it is too long, or it is not Unicode.
    """
    messages = []
    characters = 0
    for role, text in turns:
        characters += len(text)
        if characters > MAX_CHARACTERS:
            raise Unjudged(f"the conversation has more than {MAX_CHARACTERS} characters")
        try:
            messages.append(Message(role, text))
        except GuardError as error:
            raise Unjudged(f"message {len(messages)}: {error}") from error
    if not messages:
        raise Unjudged("there is no message")
    return tuple(messages)


def _parts(content: str | list[ContentPart] | None) -> list[ContentPart]:
    if isinstance(content, list):
        return content
    return []


def _call_words(tool_call: dict[str, Any]) -> str:
    """A tool call as one line of JSON without its id: `{"name": …, "arguments": {…}}`."""
    call = dict(tool_call.get("function") or tool_call.get("custom") or tool_call)
    if isinstance(call.get("arguments"), str):
        # They are JSON inside JSON, where an escape could hide a word.
        with contextlib.suppress(ValueError, RecursionError):
            call["arguments"] = json.loads(call["arguments"])
    return json.dumps(call, ensure_ascii=False)
