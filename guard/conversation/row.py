"""The conversation of a stored row, the same for training data, scans and replays.

A row has `messages` as OpenAI has them, with or without `tools` and the `response` to them, or
`prompt` and `response`, or `text`; each with or without `system`. Another of these, or of the names
that other formats have for them, must say again what one of the turns says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from guard.conversation import keys
from guard.conversation.chat import says_nothing, turns_of
from guard.conversation.example import Message
from guard.errors import GuardError
from guard.files.strict_json import RepeatedKey, in_words, read_json

CONVERSATION_FIELDS = ("messages", "prompt", "response", "text")
# What other formats call a conversation or a part of it, and these fields, by their letters.
FOREIGN_FIELDS = frozenset(
    {*CONVERSATION_FIELDS, "system", "tools", "conversation", "conversations", "dialog", "dialogue"}
    | {"history", "turns", "content", "context", "documents", "toolcalls", "functioncall"}
    | {"functions", "systemprompt", "instruction", "instructions", "input", "question", "query"}
    | {"completion", "output", "answer", "reply"}
)
_NO_LETTER = re.compile(r"[\W_]")
# A text that names tools and does not describe them.
_TOOL_NAMES = re.compile(r"[\w.-]*(?:\s*,\s*[\w.-]+)*", re.ASCII)
# What chat templates write around turns: control tokens, roles, signs.
_TEMPLATE = re.compile(
    r"<[^<>\s]{1,40}>|\[/?[A-Z_]{1,20}\]|[^\w\s]|_|\b(?:system|user|human|question|q|instruction"
    r"|input|assistant|model|bot|ai|answer|a|response|output|tool)\b",
    re.IGNORECASE,
)


def conversation_of(fields: Mapping[str, Any], text_role: str = "user") -> tuple[Message, ...]:
    """The turns of a row; a `text` is said by `text_role`. What is null is not there."""
    present = {name: value for name, value in fields.items() if value is not None}
    if "messages" in present:
        turns = _turns_of_messages(present)
        beside = ["prompt", "text"]
    elif "prompt" in present or "response" in present:
        turns = _exchange(present)
        beside = ["tools", "text"]
    elif "text" in present:
        turns = turns_of([_said(present, "text", text_role)], where="text")
        beside = ["tools"]
    else:
        nulls = "".join(f", {name} is null" for name in CONVERSATION_FIELDS if name in fields)
        got = ", ".join(fields)[:200] or "nothing"
        remedy = "A row needs messages, or prompt and response, or text, not null and not empty"
        raise GuardError(f"no conversation{nulls}", got=got, remedy=remedy)
    turns = _after_system(turns, present)
    beside += [name for name in present if _is_of_another_format(name)]
    for name in beside:
        _refuse_left_out(name, present.get(name), turns)
    if says_nothing(turns):
        remedy = "Leave the row out, or write down what was said"
        raise GuardError("the conversation is empty", got=repr(fields)[:60], remedy=remedy)
    return turns


def _is_of_another_format(name: str) -> bool:
    is_read = name in (*CONVERSATION_FIELDS, "system", "tools")
    return not is_read and _NO_LETTER.sub("", str(name).lower()) in FOREIGN_FIELDS


def json_cell(value: Any, name: str) -> Any:
    """The value of a cell that holds JSON as text, as tables have it; another value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except (ValueError, RecursionError) as error:
        problem = f"{name} must be JSON: {in_words(error)}"
        raise GuardError(problem, got=value[:60], remedy="Write it as JSON") from error


def _refuse_left_out(name: str, value: Any, turns: Sequence[Message]) -> None:
    """Raise GuardError where the field `name`, which is not read, has tools, or says what no turn
    says. A number says nothing, nor an object that only names a prompt's template.
    """
    if name == "tools":
        is_left_out = _describes_tools(value)
    elif isinstance(value, str):
        is_left_out = not (_is_said(value, turns) or _renders(value, turns))
    elif isinstance(value, dict):
        is_left_out = any(keys.unread_keys(value, keys.TEMPLATE))
    else:
        is_left_out = isinstance(value, list) and not _are_said(value, turns)
    if is_left_out:
        problem = f"{name} stands beside a conversation that is read without it, and would be left"
        remedy = f"Make it one of the messages, or leave {name} out"
        if name == "tools":
            remedy = "Write the conversation as messages, or leave the tools out"
        raise GuardError(f"{problem} out", got=repr(value)[:60], remedy=remedy)


def _describes_tools(tools: Any) -> bool:
    try:
        described = json_cell(tools, "tools")
    except GuardError as error:
        if isinstance(error.__cause__, RepeatedKey | RecursionError):
            raise
        described = tools
    if isinstance(described, str):
        return _TOOL_NAMES.fullmatch(described.strip()) is None
    return isinstance(described, list | dict) and bool(described)


def _is_said(text: str, turns: Sequence[Message]) -> bool:
    words = _words(text)
    return words == "  " or any(words in _words(turn.content) for turn in turns)


def _renders(text: str, turns: Sequence[Message]) -> bool:
    """Whether a text is the turns in order with nothing but a chat template around them."""
    words, around = _words(text), ""
    for turn in turns:
        if not turn.content.strip():
            continue
        before, content, words = words.partition(_words(turn.content).strip())
        if not content:
            return False
        around += before + " "
    return not _TEMPLATE.sub("", around + words).strip()


def _are_said(messages: list[Any], turns: Sequence[Message]) -> bool:
    try:
        return all(turn in turns for turn in turns_of(messages, where="messages"))
    except GuardError:
        return not messages


def _words(text: str) -> str:
    return f" {' '.join(text.split())} "


def _turns_of_messages(present: Mapping[str, Any]) -> tuple[Message, ...]:
    tools = json_cell(present.get("tools") or [], "tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        remedy = "Write them as OpenAI's chat completions have them"
        raise GuardError("tools must be a list of objects", got=repr(tools)[:60], remedy=remedy)
    turns = turns_of(json_cell(present["messages"], "messages"), tools, where="messages")
    return _with_response(turns, present.get("response"))


def _exchange(present: Mapping[str, Any]) -> tuple[Message, ...]:
    if not ("prompt" in present and "response" in present):
        problem = "prompt and response must both be there"
        raise GuardError(problem, got=", ".join(present), remedy="A text by itself is text")
    exchange = [_said(present, "prompt", "user"), _said(present, "response", "assistant")]
    return turns_of(exchange, where="prompt and response")


def _said(present: Mapping[str, Any], name: str, role: str) -> dict[str, str]:
    value = present[name]
    if not isinstance(value, str):
        remedy = "Write text, or messages as OpenAI has them"
        raise GuardError(f"{name} must be text", got=repr(value)[:60], remedy=remedy)
    return {"role": role, "content": value}


def _after_system(turns: tuple[Message, ...], present: Mapping[str, Any]) -> tuple[Message, ...]:
    """The turns after the row's system prompt, if it has one of its own that is not among them."""
    if not present.get("system"):
        return turns
    (system,) = turns_of([_said(present, "system", "system")], where="system")
    if system in turns:
        return turns
    return (system, *turns)


def _with_response(turns: tuple[Message, ...], response: Any) -> tuple[Message, ...]:
    """The turns and the response that a log has beside them, unless they end with it already."""
    answers = _answers_in(response)
    if not answers:
        return turns
    if len(answers) > 1:
        raise GuardError("the response has several replies", remedy="Have one row for each")
    (answer,) = turns_of([{"role": "assistant"} | answers[0]], where="response")
    if turns[-1].role != "assistant":
        return (*turns, answer)
    is_read_whole = type(answer) is Message or type(answer) is type(turns[-1])
    if is_read_whole and f"\n{answer.content.strip()}\n" in f"\n{turns[-1].content.strip()}\n":
        return turns
    remedy = "Leave one of them out, or have one row for each"
    raise GuardError("the messages end with another reply than the response", remedy=remedy)


def _answers_in(response: Any) -> list[dict[str, Any]]:
    """The messages in a response: of a text, of a message, or of a chat completion."""
    if isinstance(response, str):
        response = _reply_in(response)
    if isinstance(response, str):
        return [{"content": response}] if response.strip() else []
    if isinstance(response, dict) and "choices" in response:
        choices = response["choices"]
        if isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):
            messages = [choice.get("message") for choice in choices]
            if all(isinstance(message, dict) for message in messages):
                _refuse_beside_the_messages(response, choices)
                return messages
    elif isinstance(response, dict) and ("content" in response or "tool_calls" in response):
        return [response]
    elif not response:
        return []
    problem = "the row has a response that cannot be read"
    remedy = "Have a text, a message or a chat completion there"
    raise GuardError(problem, got=repr(response)[:60], remedy=remedy)


def _refuse_beside_the_messages(
    completion: Mapping[str, Any], choices: Sequence[Mapping[str, Any]]
) -> None:
    for fields in (completion, *choices):
        silent_keys = keys.COMPLETION if fields is completion else keys.MESSAGE
        for key in keys.unread_keys(fields, silent_keys, ("choices", "message")):
            problem = f"the response has the key {key!r}, which no rule reads"
            remedy = "Leave the key out, or have the message alone there"
            raise GuardError(problem, got=repr(fields)[:60], remedy=remedy)


def _reply_in(text: str) -> Any:
    """The message or chat completion that a cell holds as JSON; else the text itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, dict) and value.keys() & {"choices", "content", "tool_calls"}:
        return json_cell(text, "response")
    return text
